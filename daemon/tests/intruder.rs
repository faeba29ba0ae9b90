//! Somebody has taken the daemon over: what can he do? Each test is a process that has given away
//! what the daemon gives away, and then tries. It has a harness of its own, because a thread of
//! another one's would only give away its own part.

use std::collections::BTreeMap;
use std::env;
use std::fs::{File, Permissions, create_dir, remove_dir_all, set_permissions, write};
use std::io::{Error, Result};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{self, Command, ExitCode, Output};
use std::thread;

use landlock::{AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
use nightporterd::config::Config;
use nightporterd::sandbox;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, send, setsockopt, socket, sockopt,
};
use nix::unistd::{Uid, getppid, setuid};
use vm_memory::mmap::MmapRegionBuilder;

/// For a process that is to try something.
const FLAG: &str = "--attempt";

/// A way to do harm, or to work.
type Attempt = fn(&Path) -> Result<()>;

/// What comes of it.
#[derive(Debug, Eq, PartialEq)]
enum End {
    /// It can be done.
    Done,
    /// Landlock is in the way.
    Denied,
    /// There is no such system call.
    NoCall,
    /// The process ends.
    Killed,
}

/// Name, what is tried, what comes of it.
const ATTEMPTS: &[(&str, Attempt, End)] = &[
    ("a_daemon_can_make_the_sockets_of_vms_that_come", makes_a_socket, End::Done),
    ("a_daemon_can_start_threads", starts_a_thread, End::Done),
    ("an_intruder_cannot_run_a_program", runs_a_program, End::Killed),
    ("an_intruder_cannot_read_files_of_others", |_| read("/etc/passwd"), End::Denied),
    ("an_intruder_cannot_open_devices", |_| opens_a_device(), End::Denied),
    ("an_intruder_cannot_look_into_processes", |_| read("/proc/1/status"), End::Denied),
    ("an_intruder_cannot_read_them_in_a_new_thread", reads_in_a_thread, End::Denied),
    ("an_intruder_cannot_make_files_elsewhere", makes_a_file_elsewhere, End::Denied),
    ("an_intruder_cannot_make_files", makes_a_file, End::NoCall),
    ("an_intruder_cannot_make_tcp_connections", connects, End::NoCall),
    ("an_intruder_cannot_connect_by_sending", connects_by_sending, End::NoCall),
    ("an_intruder_cannot_send_pings", |_| pings(), End::NoCall),
    ("an_intruder_cannot_see_frames_of_the_host", |_| opens(AddressFamily::Packet), End::NoCall),
    ("an_intruder_cannot_speak_for_other_addresses", |_| speaks_for_others(), End::NoCall),
    ("an_intruder_cannot_set_up_routes", |_| opens(AddressFamily::Netlink), End::NoCall),
    ("an_intruder_cannot_run_code_of_his_own", |_| maps_code(), End::NoCall),
    ("an_intruder_cannot_make_namespaces", |_| makes_a_namespace(), End::NoCall),
    ("an_intruder_cannot_become_another_user", |_| becomes_root(), End::NoCall),
    ("an_intruder_cannot_signal_processes", |_| signals(), End::NoCall),
    ("an_intruder_cannot_open_files_to_everybody", opens_to_everybody, End::NoCall),
    ("an_intruder_cannot_give_files_away", gives_away, End::NoCall),
    ("an_intruder_cannot_raise_limits", |_| raises_a_limit(), End::NoCall),
];

fn makes_a_socket(own: &Path) -> Result<()> {
    let _listener = UnixListener::bind(own.join("vm"))?;
    UnixStream::connect(own.join("vm"))?;
    create_dir(own.join("more"))
}

fn starts_a_thread(_: &Path) -> Result<()> {
    thread::spawn(|| Ok(())).join().unwrap()
}

fn runs_a_program(_: &Path) -> Result<()> {
    Err(Command::new("true").exec())
}

fn read(path: &str) -> Result<()> {
    File::open(path).map(drop)
}

fn reads_in_a_thread(_: &Path) -> Result<()> {
    thread::spawn(|| read("/etc/passwd")).join().unwrap()
}

fn makes_a_file_elsewhere(own: &Path) -> Result<()> {
    UnixListener::bind(own.with_extension("elsewhere")).map(drop)
}

fn makes_a_file(own: &Path) -> Result<()> {
    File::create(own.join("file")).map(drop)
}

fn opens_to_everybody(own: &Path) -> Result<()> {
    set_permissions(own.join("np.toml"), Permissions::from_mode(0o666))
}

fn gives_away(own: &Path) -> Result<()> {
    chown(own.join("np.toml"), None, Some(12345))
}

fn connects(_: &Path) -> Result<()> {
    TcpStream::connect("127.0.0.1:1").map(drop)
}

/// It takes a socket that there is: this one is as good to the filter as that of metrics.
fn connects_by_sending(own: &Path) -> Result<()> {
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

fn opens_a_device() -> Result<()> {
    File::options().read(true).write(true).open("/dev/null").map(drop)
}

/// The process that tries: the exit code is an errno.
fn attempt(name: &str, own: &Path) -> ExitCode {
    let path = own.join("np.toml");
    let config = Config::load(&path, &BTreeMap::new()).unwrap();
    nightporterd::block_signals().unwrap();
    sandbox::enter(&config, &path).unwrap().close().unwrap();
    let (_, attempt, _) = ATTEMPTS.iter().find(|(it, ..)| *it == name).unwrap();
    match attempt(own) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            ExitCode::from(e.raw_os_error().and_then(|e| u8::try_from(e).ok()).unwrap_or(255))
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
    write(own.join("np.toml"), configuration(&own)).unwrap();
    let strictly = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let has_landlock = strictly.handle_access(AccessFs::ReadFile).is_ok();
    let (mut passed, mut failed) = (0, 0);
    for (name, _, expected) in ATTEMPTS {
        if *expected == End::Denied && !has_landlock {
            println!("test {name} ... ignored, this kernel has no Landlock");
            continue;
        }
        let program = env::current_exe().unwrap();
        let child = Command::new(program).args([FLAG, name]).arg(&own).output().unwrap();
        let is_so = end_of(&child).as_ref() == Some(expected);
        (passed, failed) = (passed + u32::from(is_so), failed + u32::from(!is_so));
        println!("test {name} ... {}", if is_so { "ok" } else { "FAILED" });
        if !is_so {
            println!("expected {expected:?}: {child:?}");
        }
    }
    remove_dir_all(&own).unwrap();
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {word}. {passed} passed; {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// Of a daemon that could have all of it.
fn configuration(own: &Path) -> String {
    let own = own.display();
    format!(
        "[daemon]\ncontrol = \"{own}/control\"\narena = \"{own}/arena\"\n\
         [[vm]]\nname = \"a\"\nsocket = \"{own}/a\"\n"
    )
}

fn end_of(output: &Output) -> Option<End> {
    match (output.status.code(), output.status.signal()) {
        (Some(0), None) => Some(End::Done),
        (Some(libc::EACCES), None) => Some(End::Denied),
        (Some(libc::ENOSYS), None) => Some(End::NoCall),
        (None, Some(libc::SIGSYS)) => Some(End::Killed),
        _ => None,
    }
}
