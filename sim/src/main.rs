//! The command line of the simulator.

fn main() {}
