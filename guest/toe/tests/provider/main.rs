//! The library under programs that do not know of it, with a host that the test plays, in a network
//! namespace of the test's own. Needs root.

mod away;
mod host;
mod launcher;
mod library;
mod programs;
mod script;

use std::env;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use host::Host;
use nightporter_core::toe::control::Program;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

const SUITE: &str = env!("CARGO_BIN_EXE_nightporter-toe-suite");
const LAUNCHER: &str = env!("CARGO_BIN_EXE_nightporter-toe");
const GUEST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 99, 0, 2));
/// The guest's, in another subnet. The host need not know it.
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 98, 0, 2));
const NATIVE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 99, 0, 9));
/// No program takes longer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Parts of the suite, and how many of its connections go by TOE at least.
const SECTIONS: [(&str, usize); 5] =
    [("streams", 8), ("readiness", 6), ("ends", 300), ("listeners", 8), ("signals", 43)];
const NOWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 99, 7, 7));

/// A guest: a network namespace with addresses, and a host beside it.
struct World {
    host: Host,
    directory: PathBuf,
}

impl World {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        unshare(CloneFlags::CLONE_NEWNET).expect("root, for a network of its own");
        for words in [
            "link set lo up",
            "addr add 10.99.0.2/24 dev lo",
            "addr add 10.99.0.9/24 dev lo",
            "addr add 10.98.0.2/24 dev lo",
            "addr add fd00::2/64 dev lo nodad",
            "route add unreachable 10.99.7.7",
        ] {
            let ip = Command::new("ip").args(words.split(' ')).status();
            assert!(ip.expect("ip of iproute2").success(), "{words}");
        }
        let name =
            format!("np-toe-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let directory = env::temp_dir().join(name);
        let host = Host::new(&directory, GUEST);
        host.state().native.insert(NATIVE);
        host.state().nowhere.insert(NOWHERE);
        Self { host, directory }
    }

    /// A program under the library.
    fn under(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", library()).env("NIGHTPORTER_TOE_FAKE_HOST", &self.directory);
        command
    }
}

impl World {
    /// A program under the launcher.
    fn launched(&self, program: &str) -> Command {
        let mut command = Command::new(LAUNCHER);
        command.env("NIGHTPORTER_TOE_FAKE_HOST", &self.directory).args(["run", "--", program]);
        command
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Where cargo has put the library: beside the test, or above it.
fn library() -> PathBuf {
    let test = env::current_exe().expect("a path");
    let mut above = test.ancestors().skip(1).map(|dir| dir.join("libnightporter_toe.so"));
    above.find(|path| path.exists()).expect("cargo builds it")
}

fn lines(output: &Output) -> Vec<String> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{errors}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stdout).lines().map(String::from).collect()
}

/// The output of a program and of its children, within a time limit.
fn within_limits(command: &mut Command) -> Output {
    command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("it starts");
    let group = Pid::from_raw(child.id().cast_signed());
    let (ends, ended) = channel::<()>();
    let watch = thread::spawn(move || {
        if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            let _ = killpg(group, Signal::SIGKILL);
        }
    });
    let output = child.wait_with_output().expect("it ran");
    drop(ends);
    watch.join().expect("joined");
    output
}

/// The suite prints natively what it prints there.
fn prints_the_same(world: &World, there: impl Fn() -> Command) {
    for (section, connections) in SECTIONS {
        let words = [&GUEST.to_string(), &NOWHERE.to_string(), section];
        let before = world.host.state().connections;
        let native = lines(&within_limits(Command::new(SUITE).args(words)));
        assert_eq!(world.host.state().connections, before, "{section}");
        let toe = lines(&within_limits(there().args(words)));
        let both = native.iter().zip(&toe);
        let differ: Vec<_> = both.filter(|(native, toe)| native != toe).collect();
        assert!(differ.is_empty() && native.len() == toe.len(), "{section}: {differ:#?}");
        let by_toe = world.host.state().connections - before;
        assert!(by_toe >= connections, "{section}: {by_toe} went by TOE");
    }
}

#[test]
fn programs_see_through_it_what_they_see_without() {
    let world = World::new();
    prints_the_same(&world, || world.under(SUITE));
}

#[test]
fn programs_see_the_same_under_the_launcher() {
    let world = World::new();
    prints_the_same(&world, || world.launched(SUITE));
}

#[test]
fn the_host_is_told_which_program_connects() {
    let world = World::new();
    for mut bash in [world.under("bash"), world.launched("bash")] {
        let words = ["-c".into(), format!("exec 3<>/dev/tcp/{NOWHERE}/80")];
        assert!(!bash.args(words).output().expect("it ran").status.success());
        let programs = std::mem::take(&mut world.host.state().programs);
        assert_eq!(programs, [Program::of(b"bash")], "{bash:?}");
    }
}
