-- From version 3: leases run on a time that the store keeps. It begins where the clock is, by which the
-- leases of before were given. Who wrote version 3 and has the file open still can go on writing.

-- What leases run on (`stores._lease_time`): the latest store time, and what to add to the elapsed time
-- of the boot for it. One row, as soon as somebody writes.
CREATE TABLE lease_time (
    single INTEGER PRIMARY KEY,
    boot TEXT NOT NULL,
    ahead REAL NOT NULL,
    latest REAL NOT NULL
);
