//! Programs under the launcher when something goes wrong.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::script::{Script, signal};
use crate::{GUEST, LAUNCHER, World};

/// Takes one who comes, says what it gets, and how that ends.
const TAKER: &str = "
listener = listening(8020)
say('listens')
s, _ = listener.accept()
got = s.recv(100)
say('got', len(got))
while type(got) is bytes and got: got = told(s.recv, 100)
say('then', got)
";

#[test]
fn what_a_launcher_that_is_killed_has_led_ends_by_a_reset_on_both_sides() {
    let Some(world) = World::of_scripts() else { return };
    let taker = world.script(TAKER);
    assert_eq!(taker.says(), "listens");
    let mut client = world.launched_script(
        "
s = connected(8020)
s.sendall(b'half of it')
say('sent')
say('then', told(s.recv, 100))
",
    );
    assert_eq!((client.says(), taker.says()), ("sent".into(), "got 10".into()));
    client.child.kill().expect("killed");
    assert_eq!(taker.says(), "then ECONNRESET");
    assert_eq!(client.says(), "then ECONNRESET");
}

#[test]
fn a_reset_is_seen_by_a_program_that_awaits_no_more() {
    let Some(world) = World::of_scripts() else { return };
    let mut taker = world.script(
        "
listener = listening(8021)
say('listens')
s, _ = listener.accept()
s.shutdown(socket.SHUT_WR)
hear()
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
s.close()
",
    );
    assert_eq!(taker.says(), "listens");
    let client = world.launched_script(
        "
s = connected(8021)
say('got', len(s.recv(100)))
poll = select.poll()
poll.register(s, 0)
poll.poll(20000)
say('then', errno.errorcode.get(s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))
",
    );
    assert_eq!(client.says(), "got 0");
    taker.hears("go on");
    // So Linux calls a reset behind the end of a stream.
    assert_eq!(client.says(), "then EPIPE");
}

#[test]
fn a_program_that_resets_after_its_last_byte_is_seen_to_do_so() {
    let Some(world) = World::of_scripts() else { return };
    let taker = world.script(
        "
listener = listening(8022)
say('listens')
s, _ = listener.accept()
say('got', len(s.recv(100)))
while not (error := s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)): pass
say('then', errno.errorcode[error])
",
    );
    assert_eq!(taker.says(), "listens");
    let mut client = world.launched_script(
        "
s = connected(8022)
s.shutdown(socket.SHUT_WR)
hear()
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
s.close()
hear()
",
    );
    assert_eq!(taker.says(), "got 0");
    client.hears("go on");
    assert_eq!(taker.says(), "then ECONNRESET");
}

#[test]
fn small_pieces_do_not_wait_for_each_other() {
    let Some(world) = World::of_scripts() else { return };
    let taker = world.script(TAKER);
    assert_eq!(taker.says(), "listens");
    let client = world.launched_script("s = connected(8020)\ns.send(b'x')\nhear()\n");
    assert_eq!(taker.says(), "got 1");
    let mut looks = world.native_script(
        "
launcher = int(hear())
process = libc.syscall(434, launcher, 0)
for fd in os.listdir(f'/proc/{launcher}/fd'):
    try:
        s = socket.socket(fileno=libc.syscall(438, process, int(fd), 0))
        if s.family == socket.AF_INET: s.getpeername()
    except OSError: continue
    if s.family == socket.AF_INET: say(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
",
    );
    looks.hears(&client.child.id().to_string());
    assert_eq!(looks.says(), "1");
}

/// Says how often a signal comes, and answers all that each client says.
const SIGNALLED_ECHO: &str = "
signal.signal(signal.SIGUSR1, lambda *_: say('signal'))
listener = listening(8023)
say('listens', os.getpid())
served = 0
while True:
    s, _ = listener.accept()
    while data := s.recv(100): s.sendall(data)
    s.close()
";

#[test]
fn a_signal_ends_an_accept_that_waits() {
    let Some(world) = World::of_scripts() else { return };
    let server = world.launched_script(SIGNALLED_ECHO);
    let listens = server.says();
    for _ in 0..5 {
        signal(&listens);
        assert_eq!(server.says(), "signal");
    }
}

#[test]
fn no_client_is_lost_to_signals_that_come_during_accept() {
    let Some(world) = World::of_scripts() else { return };
    let text = SIGNALLED_ECHO.replace("lambda *_: say('signal')", "lambda *_: None").replace(
        "served = 0",
        "signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)",
    );
    let server = world.launched_script(&text);
    server.says();
    let client = world.script(
        "
for i in range(150):
    with connected(8023) as s:
        s.settimeout(20)
        s.sendall(b'x')
        if s.recv(1) != b'x': say('lost', i)
say('done')
",
    );
    assert_eq!(client.says(), "done");
    assert_eq!(world.host.state().connections, 150);
}

#[test]
fn a_signal_during_connect_makes_no_second_connection() {
    let Some(world) = World::of_scripts() else { return };
    let server = world.script(&SIGNALLED_ECHO.replace("8023", "8024"));
    server.says();
    let mut client = world.launched_script(
        "
signal.signal(signal.SIGUSR1, lambda *_: None)
say('is', os.getpid())
hear()
s = connected(8024)
s.sendall(b'x')
say('got', len(s.recv(1)))
",
    );
    let is = client.says();
    world.host.be_silent(true);
    client.hears("connect");
    world.host.wait_for_unanswered(1);
    signal(&is);
    world.host.be_silent(false);
    assert_eq!(client.says(), "got 1");
    assert_eq!(world.host.state().connections, 1);
}

#[test]
fn a_program_that_nobody_may_look_into_is_not_told_that_a_stranger_is_this_machine() {
    let Some(world) = World::of_scripts() else { return };
    let all = Permissions::from_mode(0o777);
    for entry in fs::read_dir(&world.directory).expect("there").map(|it| it.expect("there").path())
    {
        fs::set_permissions(entry, all.clone()).expect("set");
    }
    fs::set_permissions(&world.directory, all).expect("set");
    let mut python = world.launched("python3");
    python.uid(65534).gid(65534);
    let server = Script::start(
        &world,
        python,
        "
listener = listening(8025)
libc.prctl(4, 0) # PR_SET_DUMPABLE
say('listens')
while True:
    s, peer = listener.accept()
    if told(s.recv, 100) != b'x': continue
    say(peer[0])
    s.sendall(b'y')
",
    );
    assert_eq!(server.says(), "listens");
    let client = world.script(
        "
resets = -1
got = None
while got != b'y':
    resets += 1
    s = connected(8025)
    told(s.sendall, b'x')
    got = told(s.recv, 1)
say(resets > 0)
",
    );
    // By TOE none reaches it, and then they come by TCP.
    assert_eq!((server.says(), client.says()), (GUEST.to_string(), "True".into()));
}

#[test]
fn a_listener_that_hears_no_ipv4_has_clients_by_ipv6() {
    let Some(world) = World::of_scripts() else { return };
    world.host.state().ips.push("fd00::2".parse().expect("an address"));
    let server = world.launched_script(
        "
listener = socket.create_server(('::', 8026), family=socket.AF_INET6)
say('listens')
s, peer = listener.accept()
say(peer[0])
s.sendall(b'hello')
",
    );
    assert_eq!(server.says(), "listens");
    let client = world.script(
        "
s = socket.socket(socket.AF_INET6)
s.connect(('fd00::2', 8026))
say(s.recv(100).decode())
",
    );
    assert_eq!((client.says(), server.says()), ("hello".into(), "fd00::2".into()));
    assert_eq!(world.host.state().connections, 1);
}

#[test]
fn a_daemon_that_never_answers_is_none() {
    let Some(world) = World::of_scripts() else { return };
    let native = world.native_script("listener = listening(8027)\nsay('listens')\nhear()\n");
    assert_eq!(native.says(), "listens");
    world.host.be_silent(true);
    let client = world.launched_script("connected(8027)\nsay('connected')\n");
    world.host.wait_for_unanswered(1);
    assert_eq!(client.says(), "connected");
}

#[test]
fn a_connect_that_must_not_block_does_not_wait_for_a_destination_that_does_not_answer() {
    let Some(world) = World::of_scripts() else { return };
    let native = world.native_script("listener = listening(8062)\nsay('listens')\nhear()\n");
    assert_eq!(native.says(), "listens");
    world.host.state().mute.insert(GUEST);
    let client = world.launched_script(
        "
for nonblocking in True, False:
    s = socket.socket()
    s.setblocking(not nonblocking)
    if not nonblocking:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack('ll', 0, 300000))
    began = time.monotonic()
    error = s.connect_ex((ip, 8062))
    say(error in (0, errno.EINPROGRESS), time.monotonic() - began < 10)
    select.select([], [s], [])
    say(s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), s.getpeername()[1])
",
    );
    for _ in 0..2 {
        assert_eq!((client.says(), client.says()), ("True True".into(), "0 8062".into()));
    }
    assert_eq!(world.host.state().connections, 0);
}

#[test]
fn a_listener_outlives_a_daemon_and_a_lack_of_descriptors() {
    let Some(world) = World::of_scripts() else { return };
    let shell = world.launched("python3");
    let words: Vec<_> = shell.get_args().map(OsString::from).collect();
    let mut python = Command::new("sh");
    for (name, value) in shell.get_envs() {
        python.env(name, value.expect("set"));
    }
    python.args(["-c", "ulimit -n 40; exec \"$0\" \"$@\"", LAUNCHER]).args(words);
    drop(shell);
    let server = Script::start(
        &world,
        python,
        "
listener = listening(8028)
say('listens')
def serve(s):
    while data := told(s.recv, 100):
        if type(data) is str: break
        told(s.sendall, data)
    s.close()
while True:
    s = told(listener.accept)
    if type(s) is not str: threading.Thread(target=serve, args=s[:1]).start()
",
    );
    assert_eq!(server.says(), "listens");
    let mut client = world.script(
        "
kept = [told(connected, 8028) for _ in range(30)]
say('many')
for s in kept:
    if type(s) is not str: s.close()
while hear():
    s = connected(8028)
    s.sendall(b'x')
    say('got', told(s.recv, 1))
",
    );
    assert_eq!(client.says(), "many");
    for restarts in [false, true] {
        if restarts {
            world.host.restart();
        }
        world.host.wait_for_listener(8028);
        let before = world.host.state().connections;
        let mut got = String::new();
        // Some of those that were too many may be reset still.
        for _ in 0..20 {
            client.hears("connect");
            got = client.says();
            if got == "got b'x'" {
                break;
            }
        }
        assert_eq!(got, "got b'x'");
        assert!(world.host.state().connections > before);
    }
}

#[test]
fn vtoe_12_a_socket_that_asks_for_what_only_tcp_has_is_native() {
    let Some(world) = World::of_scripts() else { return };
    world.host.state().ips.push("fd00::2".parse().expect("an address"));
    let server = world.script(
        "
listener = socket.create_server(('::', 8029), family=socket.AF_INET6, dualstack_ipv6=True)
say('listens')
while True: listener.accept()[0].close()
",
    );
    assert_eq!(server.says(), "listens");
    // TCP_MD5SIG, SO_MARK, SO_BINDTODEVICE, SO_OOBINLINE, IP_MINTTL, IP_UNICAST_IF (of the
    // loopback); TCP_NODELAY, which all may have. Then those of IPv6: IPV6_TRANSPARENT,
    // IPV6_HOPOPTS, IPV6_DSTOPTS, IPV6_MINHOPCOUNT, IPV6_UNICAST_IF; and IPV6_TCLASS.
    let text = "
key = bytes([2, 0, 0, 0, 10, 99, 0, 7]) + bytes(122) + bytes([4, 0, 0, 0, 0, 0]) + bytes(80)
padding = bytes([0, 0, 1, 4, 0, 0, 0, 0])
lo = struct.pack('!i', 1)
for level, name, value in [(6, 14, key), (1, 36, 7), (1, 25, b'lo'), (1, 10, 1), (0, 21, 1),
        (0, 50, lo), (6, 1, 1), (41, 75, 1), (41, 54, padding), (41, 59, padding), (41, 73, 1),
        (41, 76, lo), (41, 67, 1)]:
    s = socket.socket(socket.AF_INET6 if level == 41 else socket.AF_INET)
    s.setsockopt(level, name, value)
    s.connect(('fd00::2' if level == 41 else ip, 8029))
    say(level, name)
    hear()
    s.close()
";
    let (tcp_only, any) = (["6 14", "1 36", "1 25", "1 10", "0 21", "0 50"], ["6 1"]);
    let (v6_only, v6_any) = (["41 75", "41 54", "41 59", "41 73", "41 76"], ["41 67"]);
    let table: [(&[&str], usize); 4] = [(&tcp_only, 0), (&any, 1), (&v6_only, 0), (&v6_any, 1)];
    for kind in [World::script, World::launched_script] {
        let mut connections = world.host.state().connections;
        let mut client = kind(&world, text);
        for (names, by_toe) in table {
            for name in names {
                connections += by_toe;
                assert_eq!(client.says(), *name);
                assert_eq!(world.host.state().connections, connections, "option {name}");
                client.hears("go on");
            }
        }
    }
}

#[test]
fn vtoe_02_a_program_under_the_launcher_has_no_io_uring() {
    let Some(world) = World::of_scripts() else { return };
    // io_uring_setup(), which the kernel would answer with a complaint about its arguments.
    let script = world.launched_script(
        "
libc.syscall(425, 1, None)
say(errno.errorcode[ctypes.get_errno()])
",
    );
    assert_eq!(script.says(), "ENOSYS");
}

#[test]
fn a_program_whose_launcher_was_killed_goes_on_by_tcp() {
    let Some(world) = World::of_scripts() else { return };
    let mut script = world.launched_script(
        "
listener = listening(8050)
def accepts():
    say('accepts', threading.get_native_id())
    say('accepted', len(listener.accept()[0].recv(100)))
threading.Thread(target=accepts).start()
hear()
say('connects', told(connected, 8051).getpeername()[1])
s = listening(8052)
say('listens', s.getsockname()[1])
",
    );
    let accepts = script.says();
    let thread: i32 = accepts.split(' ').nth(1).expect("a number").parse().expect("a number");
    wait_until_it_waits(thread);
    script.child.kill().expect("killed");
    let native = world.native_script(
        "
listener = listening(8051)
s = connected(8050)
s.sendall(b'five!')
say('sent')
hear()
",
    );
    assert_eq!((native.says(), script.says()), ("sent".into(), "accepted 5".into()));
    script.hears("go on");
    assert_eq!((script.says(), script.says()), ("connects 8051".into(), "listens 8052".into()));
}

/// In a system call that waits.
fn wait_until_it_waits(thread: i32) {
    let state = || {
        let stat = fs::read_to_string(format!("/proc/{thread}/stat")).expect("it is there");
        stat.rsplit_once(')').map(|(_, rest)| rest.trim_start().chars().next())
    };
    while state() != Some(Some('S')) {
        std::thread::yield_now();
    }
}
