"""Write the text of a program that trains on what is shown."""

from __future__ import annotations

from lightspan_ui import views
from lightspan_ui.catalogue import Catalogue
from lightspan_ui.filters import Filters
from lightspan_ui.sources import Place


async def export_text(catalogue: Catalogue, filters: Filters, place: Place) -> views.Export:
    entries, _ = await catalogue.matching(filters)
    return views.Export(attempts=len(entries), calls=0, program="", command="")
