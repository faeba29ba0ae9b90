//! `nightporter-toe run -- CMD`: sockets over the host for programs under which no library can be
//! put, for example static ones.
//!
//! The program runs under a seccomp filter that hands some of its system calls to the launcher
//! (`watch`): connect(), listen(), accept(), getsockname(), getpeername(). The launcher does not
//! see data, so the program keeps its own TCP sockets, with their epoll, options and fork. If the
//! host answers "go", the launcher connects the program's socket, of which it takes a copy, to
//! itself over the loopback. It relays the bytes between that and a vsock socket (`relay`), at the
//! price of a copy in each direction. A reset on one side becomes a reset on the other.
//! getsockname() and getpeername() return the addresses that the host knows (`calls`).
//!
//! A program can change the target of a pointer while the launcher reads it. It gains nothing,
//! because it could itself do everything that the launcher does.

mod calls;
mod connects;
mod host;
mod listeners;
mod relay;
mod watch;

use std::env;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;

use calls::World;
use nightporter_toe_common::{address, home, pause, sys, tcp_only, transport};

fn main() -> ExitCode {
    let words: Vec<_> = env::args_os().skip(1).collect();
    let words = match &words[..] {
        [run, dashes, rest @ ..] if run == "run" && dashes == "--" => rest,
        [run, rest @ ..] if run == "run" => rest,
        _ => &[],
    };
    let [program, arguments @ ..] = words else {
        eprintln!("usage: nightporter-toe run -- CMD [ARGUMENT]...");
        return ExitCode::from(2);
    };
    let mut command = Command::new(program);
    command.args(arguments);
    let (mut child, watch) = match watch::start(command) {
        Ok(started) => started,
        Err(error) => {
            eprintln!("nightporter-toe: {}: {error}", program.display());
            return ExitCode::from(127);
        }
    };
    watch::raise_limit();
    // Before Linux 6.11 a process has its filter until it was waited for.
    let waiting = thread::spawn(move || child.wait().map_or(1, watch::exit_code));
    let world = Arc::new(World::new(watch));
    // Answers calls until no process has the filter any more: a daemon outlives the program that
    // has started it.
    while let Some(call) = world.watch.next() {
        let world = Arc::clone(&world);
        thread::spawn(move || world.answer(&call));
    }
    // Written data has to leave.
    world.wait_until_sent();
    ExitCode::from(waiting.join().unwrap_or(1))
}
