"""Several machines: a store in PostgreSQL (`postgres`), and runners as actors of a Ray cluster.

`ray_runners` is `lightspan.RayRunners`, `ray_actor` the code of one actor, `ray_cluster` the
connection to the cluster.
"""
