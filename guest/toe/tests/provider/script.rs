//! Programs of a test: Python that prints its results, a line each.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::programs::is_installed;
use crate::{GUEST, NATIVE, World};

/// Nothing takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The beginning of every script: sockets, the guest's address, and a word for the test.
const PREAMBLE: &str = "
import ctypes, errno, os, resource, select, signal, socket, struct, sys, threading, time
ip, native = sys.argv[1:3]
libc = ctypes.CDLL(None, use_errno=True)
def say(*words):
    os.write(1, (' '.join(str(word) for word in words) + '\\n').encode())
def hear():
    return sys.stdin.readline().strip()
def told(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
def connected(port):
    s = socket.socket()
    s.connect((ip, port))
    return s
def listening(port, at=ip):
    s = socket.create_server((at, port))
    return s
";

/// A script that runs, until the test ends.
pub(crate) struct Script {
    pub(crate) child: Child,
    lines: Receiver<String>,
}

impl Script {
    /// Starts one, by `python` with what else it needs.
    pub(crate) fn start(world: &World, mut python: Command, text: &str) -> Self {
        python.args(["-u", "-c", &format!("{PREAMBLE}{text}")]);
        python.args([GUEST.to_string(), NATIVE.to_string()]).current_dir(&world.directory);
        python.process_group(0);
        let mut child = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("runs");
        let (said, lines) = channel();
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = said.send(line);
            }
        });
        Self { child, lines }
    }

    /// The script's next line, within a time limit.
    pub(crate) fn says(&self) -> String {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("it says nothing"),
            Err(RecvTimeoutError::Disconnected) => panic!("it has ended"),
        }
    }

    /// Lets it go on.
    pub(crate) fn hears(&mut self, word: &str) {
        writeln!(self.child.stdin.as_mut().expect("a pipe"), "{word}").expect("it listens");
    }
}

/// SIGUSR1 for the process whose number is the second word of what it said.
pub(crate) fn signal(said: &str) {
    let pid = said.split(' ').nth(1).expect("a number").parse().expect("a number");
    kill(Pid::from_raw(pid), Signal::SIGUSR1).expect("it is there");
}

impl Drop for Script {
    fn drop(&mut self) {
        // With all that it has started.
        let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

impl World {
    /// One for scripts, if there is Python.
    pub(crate) fn of_scripts() -> Option<Self> {
        is_installed("python3").then(Self::new)
    }

    /// A script of which nothing goes by TOE.
    pub(crate) fn native_script(&self, text: &str) -> Script {
        Script::start(self, Command::new("python3"), text)
    }

    /// A script under the library.
    pub(crate) fn script(&self, text: &str) -> Script {
        Script::start(self, self.under("python3"), text)
    }

    /// A script under the launcher.
    pub(crate) fn launched_script(&self, text: &str) -> Script {
        Script::start(self, self.launched("python3"), text)
    }
}
