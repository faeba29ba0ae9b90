//! `libnightporter_toe.so`: sockets of unmodified programs over their host, by `LD_PRELOAD`.
//!
//! **Function.** A TCP socket that a program makes is native until connect() or listen(). Then the
//! library asks the host. If the host answers "go", a vsock socket takes the descriptor's number
//! (`connect`), or the descriptor becomes an epoll of two listeners (`listen`). From there on the
//! kernel does the work: read, write, epoll, dup, fork, exec, splice, MSG_PEEK, timeouts are those
//! of a vsock socket. When in doubt the socket stays native.
//!
//! **Additions to the kernel's work**: addresses (`names`), whether a finished stream was reset
//! (`ends`), options of TCP (`options`), and SHUT_RD, which is local. The host keeps everything
//! that is known of a socket, and answers over the control connection of this process (`control`).
//! A descriptor that came by fork, exec or SCM_RIGHTS is examined when it is first used.
//!
//! **Goals**: no byte is lost, no stream with missing bytes ends clean, and the data path costs one
//! check of a byte. **Not a goal**: programs that call the kernel past libc (static ones, Go,
//! io_uring). Sockets that they make are native. Of a connection that they inherit, and of one that
//! is read by io_uring or by stdio (`fdopen`), they read a reset as an end of file.
//!
//! **Unsafe** code exports C's functions and calls them. It is in two places: `calls`, the exported
//! functions, which only take their pointers apart, and `sys` (in the crate that the launcher
//! shares), the calls behind them. Functions on the data path own nothing when they call libc,
//! because a thread that is cancelled there unwinds through them.

mod calls;
mod connect;
mod control;
mod ends;
mod lease;
mod listen;
mod names;
mod options;
mod table;

use std::env;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nightporter_core::toe::control::Program;
use nightporter_toe_common::{address, home, pause, sys, tcp_only, transport};

/// Set to `off`, the provider does nothing.
const SWITCH: &str = "NIGHTPORTER_TOE";
/// Set, every decision is a line on standard error.
const LOG: &str = "NIGHTPORTER_TOE_LOG";

static LOGS: AtomicBool = AtomicBool::new(false);

/// A line for the log of `NIGHTPORTER_TOE_LOG`.
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

/// The name of this process when it began: the host has rules for programs.
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
