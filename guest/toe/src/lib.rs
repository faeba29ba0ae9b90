//! `libnightporter_toe.so`: sockets of unmodified programs over their host, by `LD_PRELOAD`.
//!
//! **What it does.** A TCP socket that a program makes is native until connect() or listen(). Then
//! the host is asked; if it says go, a vsock socket takes the descriptor's number (`connect`), or
//! the descriptor becomes an epoll of two listeners (`listen`). From there on the kernel does the
//! work: read, write, epoll, dup, fork, exec, splice, MSG_PEEK, timeouts are those of a vsock
//! socket. Whenever in doubt the socket stays native.
//!
//! **What stands between the kernel and the program** is what the kernel does not know: addresses
//! (`names`), whether a stream that is over was reset (`ends`), options of TCP (`options`), that
//! SHUT_RD is nobody else's business. The host keeps what is known of a socket, and is asked over
//! the control connection of this process (`control`); a descriptor that came by fork, exec or
//! SCM_RIGHTS is looked at when it is first used.
//!
//! **Goals**: no byte lost, no clean end where bytes are missing, nothing but a byte to look at on
//! the way of data. **Not a goal**: programs that call the kernel past libc (static ones, Go,
//! io_uring): what they make is native. Streams of stdio (`fdopen`) read past libc's names, and see
//! the end of a reset connection as an end of file.
//!
//! **Unsafe** is what exporting C's functions and calling them needs. It is in two places: `calls`,
//! the exported functions, which do nothing but take their pointers apart, and `sys`, the calls
//! behind them. Functions on the way of data own nothing when they call libc: a thread that is
//! cancelled there unwinds through them.

mod address;
mod calls;
mod connect;
mod control;
mod ends;
mod home;
mod lease;
mod listen;
mod names;
mod options;
mod sys;
mod table;
mod tcp_only;
mod transport;

use std::env;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nightporter_core::toe::control::Program;

/// Set to `off`, the provider does nothing.
const SWITCH: &str = "NIGHTPORTER_TOE";
/// Set, every decision is a line on standard error.
const LOG: &str = "NIGHTPORTER_TOE_LOG";

static LOGS: AtomicBool = AtomicBool::new(false);

/// A line for who wants to know what happens.
macro_rules! note {
    ($($text:tt)*) => {
        if $crate::logs() {
            let line = format!($($text)*);
            $crate::sys::print(&format!("nightporter-toe[{}]: {line}\n", $crate::sys::pid()));
        }
    };
}
use note;

fn logs() -> bool {
    LOGS.load(Ordering::Relaxed)
}

/// What this process was called when it began: the host has rules for programs.
static PROGRAM: OnceLock<Program> = OnceLock::new();

fn program() -> Program {
    PROGRAM.get().copied().unwrap_or(Program::NONE)
}

extern "C" fn begin() {
    sys::find();
    let _ = PROGRAM.set(Program::of(&sys::thread_name()));
    LOGS.store(env::var_os(LOG).is_some(), Ordering::Relaxed);
    if env::var_os(SWITCH).is_none_or(|value| value != "off") {
        table::enable();
    }
}
