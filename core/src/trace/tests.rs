//! The lines as people read them.
