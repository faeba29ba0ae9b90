//! A running nightporterd in a directory of its own.

use std::io::{BufRead, BufReader, Error, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nightporter_api::{Change, Plan, PortStatus, Reply, Request, Status};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longest wait of a test; only a failure reaches it.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// A directory on a tmpfs, removed afterwards.
#[derive(Debug)]
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let unique = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = PathBuf::from(format!("/dev/shm/np-daemon-{}-{unique}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a configuration with this `[daemon]` section, besides the paths, and these ports.
    pub(crate) fn configure(&self, daemon: &str, ports: &str) -> PathBuf {
        let path = self.join("np.toml");
        let dir = self.0.display();
        let text = format!(
            "[daemon]\ncontrol = \"{dir}/control\"\narena = \"{dir}/arena\"\n{daemon}\n{ports}"
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    /// One `[[vm]]` with a small budget.
    pub(crate) fn vm(&self, name: &str, more: &str) -> String {
        let socket = self.join(name);
        format!(
            "[[vm]]\nname = \"{name}\"\nsocket = \"{}\"\nbudget = \"4M\"\n{more}\n",
            socket.display()
        )
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs the daemon to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nightporterd")).args(arguments).output().unwrap()
}

/// A daemon that is ready.
#[derive(Debug)]
pub(crate) struct Host {
    child: Child,
    control: PathBuf,
}

/// The daemon with this configuration.
pub(crate) fn command(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nightporterd"));
    command.arg("--config").arg(config);
    command
}

/// Likewise, after a shell has run `before`.
pub(crate) fn command_after(before: &str, config: &Path) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{before}; exec \"$0\" --config \"$1\""));
    command.arg(env!("CARGO_BIN_EXE_nightporterd")).arg(config);
    command
}

/// A user who may do nothing.
pub(crate) const NOBODY: u32 = 65534;

/// A copy of the daemon where everybody can reach it.
pub(crate) fn copy_for_everybody(name: &str) -> PathBuf {
    let program = std::env::temp_dir().join(format!("np-{name}-{}", std::process::id()));
    std::fs::copy(env!("CARGO_BIN_EXE_nightporterd"), &program).unwrap();
    // As long as a child of another test has what we wrote it with.
    let busy = |e: &Error| e.kind() == ErrorKind::ExecutableFileBusy;
    while Command::new(&program).arg("--version").output().is_err_and(|e| busy(&e)) {}
    program
}

impl Host {
    /// Starts the daemon and waits until it says that it is ready.
    pub(crate) fn start(dir: &Dir, config: &Path) -> Self {
        Self::start_as(dir, &mut command(config))
    }

    /// Likewise, in another way.
    pub(crate) fn start_as(dir: &Dir, command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        loop {
            let line = log.next().unwrap_or_else(|| panic!("it ended: {said}")).unwrap();
            said += &line;
            said += "\n";
            if line.contains("ready: ") {
                break;
            }
        }
        // Nobody may block on a full pipe.
        thread::spawn(move || log.map_while(Result::ok).for_each(|line| eprintln!("{line}")));
        Self { child, control: dir.join("control") }
    }

    /// Starts the daemon with another log, and waits until it answers.
    pub(crate) fn start_with_log(dir: &Dir, config: &Path, log: Stdio) -> Self {
        Self::start_unheard(dir, command(config).stderr(log))
    }

    /// Starts the daemon, and waits until it answers.
    pub(crate) fn start_unheard(dir: &Dir, command: &mut Command) -> Self {
        let host = Self { child: command.spawn().unwrap(), control: dir.join("control") };
        let start = Instant::now();
        while UnixStream::connect(&host.control).is_err() {
            assert!(start.elapsed() < LIMIT, "it does not listen");
        }
        host.status(); // it answers when it has started
        host
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process that opens uplinks for it, if it is there.
    pub(crate) fn broker(&self) -> Option<u32> {
        let pid = self.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().next().map(|child| child.parse().unwrap())
    }

    /// Bytes of one kind, as proc(5) calls them.
    pub(crate) fn bytes(&self, kind: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(kind)).unwrap();
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        kib << 10
    }

    /// How many descriptors it has.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    pub(crate) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.control).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    pub(crate) fn ask(&self, request: &Request) -> Reply {
        let mut line = serde_json::to_vec(request).unwrap();
        line.push(b'\n');
        let mut stream = BufReader::new(self.connect());
        stream.get_mut().write_all(&line).unwrap();
        line.clear();
        stream.read_until(b'\n', &mut line).unwrap();
        serde_json::from_slice(&line).unwrap()
    }

    pub(crate) fn status(&self) -> Status {
        match self.ask(&Request::Status {}) {
            Reply::Status(status) => {
                assert_eq!(status.refused_calls, 0, "a call that the sandbox does not know");
                assert!(!status.broker_ended, "likewise");
                *status
            }
            other => panic!("not a status: {other:?}"),
        }
    }

    pub(crate) fn port(&self, name: &str) -> PortStatus {
        self.status().ports.into_iter().find(|p| p.name == name).expect("a port of that name")
    }

    /// Ports come, go or change, now.
    pub(crate) fn change(&self, change: Change) -> Plan {
        match self.ask(&Request::Change { change, dry_run: false }) {
            Reply::Plan(plan) => plan,
            other => panic!("not done: {other:?}"),
        }
    }

    /// Nothing changes; what the daemon says.
    pub(crate) fn refuses(&self, change: Change) -> (String, String) {
        match self.ask(&Request::Change { change, dry_run: false }) {
            Reply::Error { what, fix } => (what, fix),
            other => panic!("not refused: {other:?}"),
        }
    }

    /// The names of its ports.
    pub(crate) fn names(&self) -> Vec<String> {
        self.status().ports.into_iter().map(|port| port.name).collect()
    }

    /// Waits until a port is in some state.
    pub(crate) fn until(&self, name: &str, is: impl Fn(&PortStatus) -> bool) -> PortStatus {
        let start = Instant::now();
        loop {
            let port = self.port(name);
            if is(&port) {
                return port;
            }
            assert!(start.elapsed() < LIMIT, "still {port:?}");
        }
    }

    /// Waits until the log's thread has given up a line.
    pub(crate) fn until_a_line_is_lost(&self) {
        let start = Instant::now();
        while self.status().log_lines_lost == 0 {
            assert!(start.elapsed() < LIMIT, "no line was lost");
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(pid, signal).unwrap();
    }

    /// Its exit code; `None` if a signal ended it.
    pub(crate) fn wait(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
