//! Placeholder entry point, replaced by the first real change to this crate.
fn main() {}
