//! The program with real threads and cgroups. Its tests share the time that real-time classes may
//! have of the machine, so `.ci/test` runs them one after the other.

mod common;
mod favoured;
