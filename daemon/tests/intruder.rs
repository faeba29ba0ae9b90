//! Somebody has taken the daemon over: what can he do? Each test is a process that has given away
//! what the daemon gives away, and then tries. It has a harness of its own, because a thread of
//! another one's would only give away its own part.

use std::collections::BTreeMap;
use std::env;
use std::fs::{File, Permissions, create_dir, remove_dir_all, remove_file, set_permissions, write};
use std::io::{Error, Result};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{self, Command, ExitCode, Output};
use std::thread;

use landlock::{AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr};
use nightporterd::broker::{shut, shut_connector, shut_dialer};
use nightporterd::config::{Source, UplinkConfig, UplinkKind};
use nightporterd::sandbox::{self, Sandbox};
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, send, setsockopt,
    socket, sockopt,
};
use nix::unistd::{Uid, getppid, setuid};
use vm_memory::mmap::MmapRegionBuilder;

/// For a process that is to try something.
const FLAG: &str = "--attempt";
/// Exit codes that are no errno.
const REFUSED: u8 = 255;
const SKIPPED: u8 = 254;

/// A way to do harm, or to work.
type Attempt = fn(&Path, &Sandbox) -> Result<()>;
type AttemptOfBroker = fn(&Path) -> Result<()>;

/// The outcome of an attempt.
#[derive(Debug, Eq, PartialEq)]
enum End {
    /// It can be done.
    Done,
    /// Landlock is in the way.
    Denied,
    /// There is no such system call.
    NoCall,
    /// The broker does not do it.
    Refused,
    /// The process ends.
    Killed,
}

/// Name, what is tried, what comes of it.
const ATTEMPTS: &[(&str, Attempt, End)] = &[
    ("a_daemon_can_make_the_sockets_of_vms_that_come", makes_a_socket, End::Done),
    ("a_daemon_can_start_threads", starts_a_thread, End::Done),
    ("an_intruder_cannot_run_a_program", |_, _| runs_a_program(), End::Killed),
    ("an_intruder_cannot_read_files_of_others", |_, _| read("/etc/passwd"), End::Denied),
    ("an_intruder_cannot_open_devices", |_, _| opens_a_device("/dev/null"), End::Denied),
    ("an_intruder_cannot_open_taps", |_, _| opens_a_device("/dev/net/tun"), End::Denied),
    ("an_intruder_cannot_look_into_processes", |_, _| read("/proc/1/status"), End::Denied),
    ("an_intruder_cannot_read_them_in_a_new_thread", |_, _| reads_in_a_thread(), End::Denied),
    ("an_intruder_cannot_make_files_elsewhere", makes_a_file_elsewhere, End::Denied),
    ("an_intruder_cannot_make_files", makes_a_file, End::NoCall),
    ("an_intruder_cannot_make_tcp_connections", |_, _| connects(), End::NoCall),
    ("an_intruder_cannot_connect_by_sending", connects_by_sending, End::NoCall),
    ("an_intruder_cannot_send_pings", |_, _| pings(), End::NoCall),
    ("an_intruder_cannot_see_frames_of_the_host", |_, _| opens(AddressFamily::Packet), End::NoCall),
    ("an_intruder_cannot_speak_for_other_addresses", |_, _| speaks_for_others(), End::NoCall),
    ("an_intruder_cannot_take_more_memory_for_sockets", |_, _| forces_a_buffer(), End::NoCall),
    ("an_intruder_cannot_set_up_routes", |_, _| opens(AddressFamily::Netlink), End::NoCall),
    ("an_intruder_cannot_run_code_of_his_own", |_, _| maps_code(), End::NoCall),
    ("an_intruder_cannot_make_namespaces", |_, _| makes_a_namespace(), End::NoCall),
    ("an_intruder_cannot_become_another_user", |_, _| becomes_root(), End::NoCall),
    ("an_intruder_cannot_signal_processes", |_, _| signals(), End::NoCall),
    ("an_intruder_cannot_open_files_to_everybody", opens_to_everybody, End::NoCall),
    ("an_intruder_cannot_give_files_away", gives_away, End::NoCall),
    ("an_intruder_cannot_raise_limits", |_, _| raises_a_limit(), End::NoCall),
];

/// Requests to the broker; its host has the interfaces that [`prepare`] makes.
const ASKED: &[(&str, Attempt, End)] = &[
    ("a_daemon_can_open_uplinks_of_its_file", |_, s| asks(s, "tap", "np0", Some("br0")), End::Done),
    (
        "a_daemon_can_put_a_new_tap_into_a_bridge",
        |_, s| asks(s, "tap", "np8", Some("br1")),
        End::Done,
    ),
    ("a_daemon_can_open_a_macvtap_of_its_file", |_, s| asks(s, "macvtap", "mv0", None), End::Done),
    (
        "an_intruder_cannot_reach_other_bridges",
        |_, s| asks(s, "tap", "np8", Some("br2")),
        End::Refused,
    ),
    (
        "an_intruder_cannot_make_taps_that_the_host_hears",
        |_, s| asks(s, "tap", "np8", None),
        End::Refused,
    ),
    (
        "an_intruder_cannot_make_taps_of_other_names",
        |_, s| asks(s, "tap", "en7", Some("br1")),
        End::Refused,
    ),
    (
        "an_intruder_cannot_attach_to_taps_of_others",
        |_, s| asks(s, "tap", "np7", Some("br1")),
        End::Refused,
    ),
    (
        "an_intruder_cannot_move_taps_of_others",
        |_, s| s.broker.join(&uplink("tap", "np7", Some("br1"))),
        End::Refused,
    ),
    (
        "an_intruder_cannot_open_other_macvtaps",
        |_, s| asks(s, "macvtap", "mv7", None),
        End::Refused,
    ),
];

/// A daemon has them that has one in its file, on a kernel that has them.
const MACVTAPS: [&str; 2] = ["mv0", "mv7"];

/// Attempts of an intruder in the broker, the connector or the dialer.
const OF_BROKER: &[(&str, AttemptOfBroker, End)] = &[
    ("a_broker_cannot_run_a_program", |_| runs_a_program(), End::Killed),
    ("a_broker_cannot_read_files_of_others", |_| read("/etc/passwd"), End::Denied),
    ("a_broker_cannot_open_devices", |_| opens_a_device("/dev/null"), End::Denied),
    ("a_broker_cannot_make_files", |own| File::create(own.join("file")).map(drop), End::Killed),
    (
        "a_broker_cannot_make_sockets_that_others_find",
        |own| UnixDatagram::bind(own.join("socket")).map(drop),
        End::Denied,
    ),
    ("a_broker_cannot_remove_files", |own| remove_file(own.join("np.toml")), End::Killed),
    ("a_broker_cannot_start_threads", |_| reads_in_a_thread(), End::Killed),
    ("a_broker_cannot_make_tcp_connections", |_| connects(), End::Killed),
    ("a_broker_cannot_see_frames_of_the_host", |_| opens(AddressFamily::Packet), End::Killed),
    ("a_broker_cannot_set_up_routes", |_| opens(AddressFamily::Netlink), End::Killed),
    ("a_broker_cannot_run_code_of_his_own", |_| maps_code(), End::Killed),
    ("a_broker_cannot_make_namespaces", |_| makes_a_namespace(), End::Killed),
    ("a_broker_cannot_become_another_user", |_| becomes_root(), End::Killed),
    ("a_broker_cannot_signal_processes", |_| signals(), End::Killed),
    ("a_connector_cannot_run_a_program", |_| runs_a_program(), End::Killed),
    ("a_connector_cannot_read_files", |_| read("/etc/passwd"), End::Killed),
    ("a_connector_cannot_reach_other_ports", |_| connects(), End::Denied),
    ("a_connector_cannot_send_datagrams", |_| opens(AddressFamily::Inet), End::Killed),
    ("a_connector_cannot_set_up_routes", |_| opens(AddressFamily::Netlink), End::Killed),
    ("a_connector_cannot_listen", |_| TcpListener::bind("127.0.0.1:0").map(drop), End::Killed),
    ("a_dialer_cannot_run_a_program", |_| runs_a_program(), End::Killed),
    ("a_dialer_cannot_read_files", |_| read("/etc/passwd"), End::Killed),
    ("a_dialer_cannot_send_datagrams", |_| opens(AddressFamily::Inet), End::Killed),
    ("a_dialer_cannot_set_up_routes", |_| opens(AddressFamily::Netlink), End::Killed),
    ("a_dialer_cannot_reach_other_ports", |_| connects_by_tcp(), End::Denied),
    ("a_dialer_cannot_start_threads", |_| reads_in_a_thread(), End::Killed),
];

fn makes_a_socket(own: &Path, _: &Sandbox) -> Result<()> {
    let _listener = UnixListener::bind(own.join("vm"))?;
    UnixStream::connect(own.join("vm"))?;
    create_dir(own.join("more"))
}

fn starts_a_thread(_: &Path, _: &Sandbox) -> Result<()> {
    thread::spawn(|| Ok(())).join().unwrap()
}

fn connects_by_tcp() -> Result<()> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Inet, SockType::Stream, flags, SockProtocol::Tcp)?;
    nix::sys::socket::connect(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 1))?;
    Ok(())
}

fn runs_a_program() -> Result<()> {
    Err(Command::new("true").exec())
}

fn read(path: &str) -> Result<()> {
    File::open(path).map(drop)
}

fn reads_in_a_thread() -> Result<()> {
    thread::spawn(|| read("/etc/passwd")).join().unwrap()
}

fn makes_a_file_elsewhere(own: &Path, _: &Sandbox) -> Result<()> {
    UnixListener::bind(own.with_extension("elsewhere")).map(drop)
}

fn makes_a_file(own: &Path, _: &Sandbox) -> Result<()> {
    File::create(own.join("file")).map(drop)
}

fn opens_to_everybody(own: &Path, _: &Sandbox) -> Result<()> {
    set_permissions(own.join("np.toml"), Permissions::from_mode(0o666))
}

fn gives_away(own: &Path, _: &Sandbox) -> Result<()> {
    chown(own.join("np.toml"), None, Some(12345))
}

fn connects() -> Result<()> {
    TcpStream::connect("127.0.0.1:1").map(drop)
}

/// It takes a socket that there is: this one is as good to the filter as that of metrics.
fn connects_by_sending(own: &Path, _: &Sandbox) -> Result<()> {
    let _theirs = UnixDatagram::bind(own.join("theirs"))?;
    let ours = UnixDatagram::unbound()?;
    ours.connect(own.join("theirs"))?;
    let fast_open = MsgFlags::from_bits_retain(libc::MSG_FASTOPEN);
    send(ours.as_raw_fd(), b"GET", fast_open)?;
    Ok(())
}

fn pings() -> Result<()> {
    let icmp = SockProtocol::Icmp;
    socket(AddressFamily::Inet, SockType::Datagram, SockFlag::empty(), icmp)?;
    Ok(())
}

fn opens(family: AddressFamily) -> Result<()> {
    socket(family, SockType::Datagram, SockFlag::empty(), None)?;
    Ok(())
}

fn speaks_for_others() -> Result<()> {
    let datagrams = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::empty(), None)?;
    Ok(setsockopt(&datagrams, sockopt::IpTransparent, &true)?)
}

fn maps_code() -> Result<()> {
    let map = MmapRegionBuilder::<()>::new(4096).with_mmap_prot(libc::PROT_EXEC).build();
    map.map(drop).map_err(|_| Error::last_os_error())
}

fn makes_a_namespace() -> Result<()> {
    Ok(unshare(CloneFlags::CLONE_NEWUSER)?)
}

fn becomes_root() -> Result<()> {
    Ok(setuid(Uid::from_raw(0))?)
}

fn signals() -> Result<()> {
    Ok(kill(getppid(), Signal::SIGCONT)?)
}

fn raises_a_limit() -> Result<()> {
    Ok(setrlimit(Resource::RLIMIT_NOFILE, 1, 1)?)
}

fn opens_a_device(path: &str) -> Result<()> {
    File::options().read(true).write(true).open(path).map(drop)
}

fn forces_a_buffer() -> Result<()> {
    let datagrams = UdpSocket::bind("127.0.0.1:0")?;
    Ok(setsockopt(&datagrams, sockopt::SndBufForce, &(1 << 30))?)
}

fn asks(sandbox: &Sandbox, kind: &str, ifname: &str, bridge: Option<&str>) -> Result<()> {
    sandbox.broker.open(&uplink(kind, ifname, bridge)).map(drop).map_err(Error::other)
}

fn uplink(kind: &str, ifname: &str, bridge: Option<&str>) -> UplinkConfig {
    let kind = if kind == "tap" { UplinkKind::Tap } else { UplinkKind::Macvtap };
    let (ifname, bridge) = (ifname.into(), bridge.map(Into::into));
    UplinkConfig { name: "lan".into(), network: None, kind, ifname, create: true, bridge }
}

/// A host for the broker: bridges, a tap of somebody else, and macvtaps with their devices, if
/// `own` is the directory of a daemon that has one. `false`: not for us.
fn prepare(name: &str, own: &Path) -> bool {
    let run = |program: &str, arguments: &[&str]| {
        Command::new(program).args(arguments).status().unwrap().success()
    };
    let ip = |arguments: &str| run("ip", &arguments.split(' ').collect::<Vec<_>>());
    if unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).is_err() {
        return false;
    }
    for bridge in ["br0", "br1", "br2"] {
        assert!(ip(&format!("link add {bridge} type bridge")), "{bridge}");
    }
    assert!(ip("tuntap add dev np7 mode tap"));
    if !name.contains("macvtap") {
        return true;
    }
    if !MACVTAPS.iter().all(|it| ip(&format!("link add link br0 name {it} type macvtap"))) {
        return false;
    }
    // Devices of its own, as udev would make them, where no others are.
    let devices = "mount --make-rprivate / && mkdir $0/sys && mount -t sysfs none $0/sys &&
        mount -t tmpfs none /dev && mkdir /dev/net && mknod /dev/net/tun c 10 200 &&
        for dir in $0/sys/class/net/mv*/macvtap/tap*; do
            mknod /dev/${dir##*/} c $(tr : ' ' < $dir/dev) || exit 1
        done && umount $0/sys && rmdir $0/sys";
    assert!(run("sh", &["-c", devices, &own.display().to_string()]));
    true
}

/// The process that tries: the exit code is an errno.
fn attempt(name: &str, own: &Path) -> ExitCode {
    let source = Source { path: own.join("np.toml"), overrides: BTreeMap::new() };
    let config = source.load().unwrap();
    nightporterd::block_signals().unwrap();
    let of_broker = OF_BROKER.iter().find(|(it, ..)| *it == name);
    let result = if let Some((_, attempt, _)) = of_broker {
        if name.starts_with("a_connector") {
            shut_connector(&["127.0.0.1:2".parse().unwrap()]).unwrap();
        } else if name.starts_with("a_dialer") {
            shut_dialer(2).unwrap();
        } else {
            shut(&source.path, false).unwrap();
        }
        attempt(own)
    } else {
        if ASKED.iter().any(|(it, ..)| *it == name) && !prepare(name, own) {
            return ExitCode::from(SKIPPED);
        }
        let sandbox = sandbox::enter(&config, &source).unwrap();
        sandbox.close().unwrap();
        let (_, attempt, _) = ATTEMPTS.iter().chain(ASKED).find(|(it, ..)| *it == name).unwrap();
        attempt(own, &sandbox)
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            ExitCode::from(e.raw_os_error().and_then(|e| u8::try_from(e).ok()).unwrap_or(REFUSED))
        }
    }
}

/// All attempts, each in a process of its own, and a report like that of other tests.
fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().collect();
    if let [_, flag, name, own] = &arguments[..]
        && flag == FLAG
    {
        return attempt(name, Path::new(own));
    }
    let own = env::temp_dir().join(format!("np-intruder-{}", process::id()));
    create_dir(&own).unwrap();
    for (dir, more) in DAEMONS {
        let dir = own.join(dir);
        create_dir(&dir).unwrap();
        write(dir.join("np.toml"), configuration(&dir, more)).unwrap();
    }
    let strictly = || Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let has_landlock = strictly().handle_access(AccessFs::ReadFile).is_ok();
    let has_ports = strictly().handle_access(AccessNet::ConnectTcp).is_ok();
    let (mut passed, mut failed) = (0, 0);
    let all = ATTEMPTS.iter().chain(ASKED).map(|(name, _, expected)| (name, expected));
    let all = all.chain(OF_BROKER.iter().map(|(name, _, expected)| (name, expected)));
    for (name, expected) in all {
        let can_deny = if name.ends_with("_ports") { has_ports } else { has_landlock };
        if *expected == End::Denied && !can_deny {
            println!("test {name} ... ignored, this kernel has no Landlock, or an old one");
            continue;
        }
        // Without one in its file a daemon has no device of a macvtap, whatever is asked.
        let daemons = if name.contains("macvtap") { &DAEMONS[1..] } else { &DAEMONS };
        let ends = daemons.iter().map(|(dir, _)| {
            let program = env::current_exe().unwrap();
            Command::new(program).args([FLAG, name]).arg(own.join(dir)).output().unwrap()
        });
        let ends: Vec<_> = ends.collect();
        if ends.iter().any(|end| end.status.code() == Some(SKIPPED.into())) {
            println!("test {name} ... ignored, needs root: it makes taps");
            continue;
        }
        let wrong: Vec<_> =
            ends.iter().filter(|end| end_of(end).as_ref() != Some(expected)).collect();
        let is_so = wrong.is_empty();
        (passed, failed) = (passed + u32::from(is_so), failed + u32::from(!is_so));
        println!("test {name} ... {}", if is_so { "ok" } else { "FAILED" });
        if !is_so {
            println!("expected {expected:?}: {wrong:?}");
        }
    }
    remove_dir_all(&own).unwrap();
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {word}. {passed} passed; {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// Of a daemon that has little, and of one that has all that gives it more rights.
const DAEMONS: [(&str, &str); 2] = [
    ("little", "metrics = \"off\""),
    ("all", "metrics = \"127.0.0.1:9469\"\nsocket_group = \"root\"\nsocket_user = \"root\""),
];

fn configuration(own: &Path, more: &str) -> String {
    let own = own.display();
    let macvtap = "[[uplink]]\nname = \"mv\"\nkind = \"macvtap\"\nifname = \"mv0\"\n";
    format!(
        "[daemon]\ncontrol = \"{own}/control\"\narena = \"{own}/arena\"\nbridges = [\"br1\"]\n\
         {more}\n[[vm]]\nname = \"a\"\nsocket = \"{own}/a\"\n\
         [[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\nbridge = \"br0\"\n{}",
        if more.contains("group") { macvtap } else { "" }
    )
}

fn end_of(output: &Output) -> Option<End> {
    match (output.status.code(), output.status.signal()) {
        (Some(0), None) => Some(End::Done),
        (Some(libc::EACCES), None) => Some(End::Denied),
        (Some(libc::ENOSYS), None) => Some(End::NoCall),
        (Some(code), None) if code == i32::from(REFUSED) => Some(End::Refused),
        (None, Some(libc::SIGSYS)) => Some(End::Killed),
        _ => None,
    }
}
