//! The next daemon goes on with the connections of VMMs, which systemd, a played one, has kept for
//! it.

use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use nightporter_api::Change;
use nightporterd::vhost::features::bit;
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Group};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::guest::{Guest, PLAIN, RAM_LEN};
use crate::host::{Dir, Host};
use crate::segment::End;
use crate::systemd::{Systemd, receive, send};

const A: End = End(1, 40_001);
const B: End = End(2, 80);

/// A host whose daemons are started one after the other.
struct Machine {
    dir: Dir,
    config: PathBuf,
    systemd: Systemd,
}

impl Machine {
    /// For a daemon with these VMs.
    fn new(vms: &[&str]) -> Self {
        let dir = Dir::new();
        let systemd = Systemd::new(dir.join("notify")).unwrap();
        let mut it = Self { config: PathBuf::new(), dir, systemd };
        it.configures(vms);
        it
    }

    fn configures(&mut self, vms: &[&str]) {
        let ports: String = vms.iter().map(|vm| self.dir.vm(vm, "")).collect();
        self.config = self.dir.configure("metrics = \"off\"", &ports);
    }

    fn socket(&self, vm: &str) -> PathBuf {
        self.dir.join(vm)
    }

    /// Starts the next daemon with all that is kept.
    fn starts(&mut self) -> Host {
        let program = Path::new(env!("CARGO_BIN_EXE_nightporterd"));
        let (mut command, _copies) = self.systemd.command(program);
        Host::start_as(&self.dir, command.arg("--config").arg(&self.config))
    }

    /// Starts a daemon that ends at once.
    fn fails_to_start(&mut self) -> ExitStatus {
        let program = Path::new(env!("CARGO_BIN_EXE_nightporterd"));
        let (mut command, _copies) = self.systemd.command(program);
        command.arg("--config").arg(&self.config).status().unwrap()
    }

    /// The names of what is kept.
    fn keeps(&mut self) -> Vec<&str> {
        self.systemd.keeps()
    }

    /// Takes out of the store what the last daemon has left of the only VM, and puts this there.
    fn changes_record(&mut self, change: Damage) {
        self.keeps();
        let [(_, one), (_, other)] = &self.systemd.store[..] else { panic!("of one VM") };
        let (mut bytes, mut fds) = receive(other).expect("the daemon has left something");
        change(&mut bytes, &mut fds);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        send(one, &bytes, &fds);
    }
}

/// The daemon ends by this signal, after the turn in which it has heard VMMs.
fn ends(host: Host, signal: Signal) {
    host.status();
    host.signal(signal);
    assert_eq!(host.wait(), (signal == Signal::SIGTERM).then_some(0));
}

/// A frame that is nothing but Ethernet, with a number in it.
fn numbered(from: End, to: End, n: u16) -> Vec<u8> {
    let mut frame = [&to.mac()[..], &from.mac(), &[0x88, 0xb5], &n.to_be_bytes()].concat();
    frame.resize(60, 0);
    frame
}

/// A guest with buffers.
fn boot(socket: &Path) -> Guest {
    let mut guest = Guest::boot(socket, PLAIN);
    guest.offer(64);
    guest
}

/// Frames go both ways.
fn talk(a: &mut Guest, b: &mut Guest, n: u16) {
    let (there, back) = (numbered(A, B, n), numbered(B, A, n));
    a.send_plain(&there);
    assert_eq!(b.receive(1), [there]);
    b.send_plain(&back);
    assert_eq!(a.receive(1), [back]);
}

/// Whether the daemon has hung up, and said nothing else.
fn is_left(guest: &Guest) -> bool {
    guest.connection().read(&mut [0; 1]).unwrap() == 0
}

/// Whether there is nobody at the other end; what the VMM has said may be unread.
fn is_gone(guest: &Guest) -> bool {
    let read = guest.connection().read(&mut [0; 1]);
    read.map_or_else(|e| e.kind() == ErrorKind::ConnectionReset, |n| n == 0)
}

#[test]
fn vmms_notice_neither_a_restart_nor_a_killed_daemon() {
    let mut machine = Machine::new(&["a", "b"]);
    let mut host = machine.starts();
    let (mut a, mut b) = (boot(&machine.socket("a")), boot(&machine.socket("b")));
    talk(&mut a, &mut b, 0);
    for n in 1..=4 {
        let is_killed = n % 2 == 1;
        ends(host, if is_killed { Signal::SIGKILL } else { Signal::SIGTERM });
        // The memory of its store is left in either case, and promises in one.
        let there = ["arena", "arena.empty"].map(|name| machine.dir.join(name).exists());
        assert_eq!(there, [is_killed, !is_killed]);
        assert_eq!(machine.keeps(), ["vm-a", "vm-a", "vm-b", "vm-b"]);
        // Of the time without a daemon: a frame, and a question of the VMM.
        a.puts(&numbered(A, B, 100 + n));
        Guest::begins_to_ask_for_features(b.connection());
        host = machine.starts();
        assert!(!machine.dir.join("arena.empty").exists());
        assert_eq!(b.receive(1), [numbered(A, B, 100 + n)]);
        b.connection().read_exact(&mut [0; 20]).unwrap();
        while a.taken() == 0 {} // its end comes with the turn's
        talk(&mut a, &mut b, n);
        let port = host.port("a");
        assert!(port.link && port.vm.unwrap().listens);
    }
    // A VM that goes is kept no longer.
    let vm = "b".to_owned();
    host.change(Change::RemoveVm { name: vm, drain_ms: None });
    assert!(is_left(&b));
    assert_eq!(machine.keeps(), ["vm-a", "vm-a"]);
    // One that the next daemon does not know is not, either.
    ends(host, Signal::SIGKILL);
    machine.configures(&["b"]);
    let _host = machine.starts();
    assert!(is_left(&a));
    assert!(machine.keeps().is_empty());
}

#[test]
fn memory_that_has_come_and_gone_is_the_next_daemons_too() {
    const FROM: u64 = 1 << 34;
    let mut machine = Machine::new(&["a"]);
    let host = machine.starts();
    let mut a = Guest::boot(&machine.socket("a"), PLAIN | bit::INDIRECT_DESC);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("more", flags).unwrap();
    ftruncate(&file, 4096 + (1 << 20)).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    a.has_more_memory(FROM, 1 << 20, file.as_fd());
    ends(host, Signal::SIGKILL);
    let host = machine.starts();
    a.sends_scattered(FROM, 4096, 4);
    host.until("a", |port| port.frames_from_port == 1);
    // With the table of the beginning it is not there any more.
    a.has_memory(RAM_LEN);
    ends(host, Signal::SIGKILL);
    let host = machine.starts();
    a.sends_scattered(FROM, 4096, 4);
    host.until("a", |port| port.vm.as_ref().is_some_and(|vm| vm.ring_faults == 1));
}

#[test]
fn a_daemon_that_is_killed_amid_a_message_or_a_migration_leaves_no_connection() {
    let mut machine = Machine::new(&["a"]);
    let mut host = machine.starts();
    let mut a = boot(&machine.socket("a"));
    Guest::begins_to_ask_for_half(a.connection());
    ends(host, Signal::SIGKILL);
    host = machine.starts();
    assert!(is_left(&a));
    a.goes_on(&machine.socket("a"), PLAIN);
    host.until("a", |port| port.link);
    a.begins_to_migrate(PLAIN);
    ends(host, Signal::SIGKILL);
    let host = machine.starts();
    assert!(is_left(&a));
    a.goes_on(&machine.socket("a"), PLAIN);
    host.until("a", |port| port.link);
}

#[test]
fn a_place_for_marks_that_was_passed_is_the_next_daemons_too() {
    let mut machine = Machine::new(&["a", "b"]);
    let host = machine.starts();
    let (mut a, mut b) = (boot(&machine.socket("a")), boot(&machine.socket("b")));
    a.passes_log();
    ends(host, Signal::SIGKILL);
    let host = machine.starts();
    a.wants_marks(PLAIN);
    assert!(host.port("a").link, "without a place no ring may run");
    talk(&mut a, &mut b, 0);
}

#[test]
fn a_daemon_that_does_not_start_lets_vmms_go() {
    let mut machine = Machine::new(&["a"]);
    let mut host = machine.starts();
    let mut a = boot(&machine.socket("a"));
    let breaks: [fn(&Machine); 2] = [
        |machine| drop(machine.dir.configure("no_such_key = 1", "")),
        |machine| {
            let control = format!("control = \"{}\"", machine.dir.join("none/control").display());
            let text = std::fs::read_to_string(&machine.config).unwrap();
            let other = text.lines().filter(|line| !line.starts_with("control = "));
            let other =
                other.collect::<Vec<_>>().join("\n").replace("[daemon]", "[daemon]\nCONTROL");
            std::fs::write(&machine.config, other.replace("CONTROL", &control)).unwrap();
            std::fs::write(machine.dir.join("none"), "").unwrap();
        },
    ];
    for breaks in breaks {
        ends(host, Signal::SIGKILL);
        breaks(&machine);
        Guest::begins_to_ask_for_features(a.connection());
        assert!(!machine.fails_to_start().success());
        assert!(is_gone(&a));
        machine.configures(&["a"]);
        host = machine.starts();
        a.goes_on(&machine.socket("a"), PLAIN);
        host.until("a", |port| port.link);
        assert_eq!(machine.keeps(), ["vm-a", "vm-a"]);
    }
}

#[test]
fn a_socket_that_gets_another_owner_is_no_longer_the_vmms_that_was_there() {
    let mut machine = Machine::new(&["a"]);
    let host = machine.starts();
    let mut a = boot(&machine.socket("a"));
    ends(host, Signal::SIGTERM);
    let group = Group::from_gid(Gid::current()).unwrap().expect("a name").name;
    let vm = machine.dir.vm("a", &format!("socket_group = \"{group}\""));
    machine.config = machine.dir.configure("metrics = \"off\"", &vm);
    let host = machine.starts();
    assert!(is_left(&a));
    a.goes_on(&machine.socket("a"), PLAIN);
    host.until("a", |port| port.link);
    ends(host, Signal::SIGTERM);
    let host = machine.starts();
    assert!(host.port("a").link, "the owner is the same");
}

/// A change of a record, and of its descriptors.
type Damage = fn(&mut Vec<u8>, &mut Vec<OwnedFd>);

#[test]
fn a_record_that_is_damaged_or_of_another_version_is_not_used() {
    let mut machine = Machine::new(&["a"]);
    let mut host = machine.starts();
    let mut a = boot(&machine.socket("a"));
    let damages: [Damage; 7] = [
        |bytes, _| bytes[7] += 1,
        |bytes, _| bytes.truncate(bytes.len() - 1),
        |bytes, _| bytes[24..28].fill(0xff),
        |bytes, _| bytes.clear(),
        |_, fds| drop(fds.pop()),
        |_, fds| fds.push(fds[0].try_clone().unwrap()),
        |bytes, _| bytes[32..40].fill(0xff), // features that nobody has offered
    ];
    for damage in damages {
        ends(host, Signal::SIGKILL);
        machine.changes_record(damage);
        host = machine.starts();
        assert!(is_left(&a));
        a.goes_on(&machine.socket("a"), PLAIN);
        host.until("a", |port| port.link);
        assert_eq!(machine.keeps(), ["vm-a", "vm-a"]);
    }
    // Two descriptors that are no pair.
    ends(host, Signal::SIGKILL);
    machine.keeps();
    machine.systemd.store[1].1 = UnixStream::pair().unwrap().0.into();
    let host = machine.starts();
    assert!(is_left(&a));
    a.goes_on(&machine.socket("a"), PLAIN);
    host.until("a", |port| port.link);
    assert_eq!(machine.keeps(), ["vm-a", "vm-a"]);
    // A descriptor of another version altogether is kept no longer.
    ends(host, Signal::SIGKILL);
    let (_, fd) = machine.systemd.store.pop().unwrap();
    machine.systemd.store.push(("tap-a".into(), fd));
    let host = machine.starts();
    assert!(machine.keeps().is_empty() && is_left(&a));
    a.goes_on(&machine.socket("a"), PLAIN);
    host.until("a", |port| port.link);
    assert_eq!(machine.keeps(), ["vm-a", "vm-a"]);
}
