//! COM-01 and P-10.
