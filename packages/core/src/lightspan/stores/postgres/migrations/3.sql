-- Version 3: leases run on a time that the store keeps (`stores._lease_time`). It begins, with the first
-- era, where the clock is, by which the leases of before were given.

ALTER TABLE ends
    ADD COLUMN lease_time DOUBLE PRECISION NOT NULL DEFAULT 0,
    ADD COLUMN lease_era BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN lease_at DOUBLE PRECISION NOT NULL DEFAULT 0;
