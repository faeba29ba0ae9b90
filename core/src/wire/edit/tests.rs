//! Every edit against a full recomputation (COM-14, COM-15, P-09).
