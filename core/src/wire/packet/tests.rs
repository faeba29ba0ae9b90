//! COM-01 to COM-09 on frames written out by hand.
