//! Traces of the rules of Linux that the host relies on.
