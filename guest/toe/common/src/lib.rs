//! The common part of the virtual TOE's library and launcher: the way to the host, the rules by
//! which a socket stays native, addresses, and the system calls behind all of it.
//!
//! The library is a `cdylib` that exports libc's names, so the launcher cannot use it.

#![deny(unsafe_code)] // `sys` alone has it.

pub mod address;
pub mod home;
pub mod pause;
#[allow(unsafe_code)]
pub mod sys;
pub mod tcp_only;
pub mod transport;
