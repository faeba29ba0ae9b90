//! Sums against the plainest possible one, and increments against sums (COM-14, P-09).
