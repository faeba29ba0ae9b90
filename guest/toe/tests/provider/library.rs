//! Programs under the library when something goes wrong, or when they do unusual things.

use crate::script::{Script, signal};
use crate::{GUEST, NATIVE, OTHER, World};

/// Answers each who comes with a word, and ends when a word comes back.
const ECHO: &str = "
listener = listening(8030)
say('listens')
while True:
    s, _ = listener.accept()
    while type(data := told(s.recv, 100)) is bytes and data: told(s.sendall, data)
    s.close()
";

fn echo(world: &World) -> Script {
    let server = world.script(ECHO);
    assert_eq!(server.says(), "listens");
    world.host.wait_for_listener(8030);
    server
}

#[test]
fn a_daemon_that_does_not_answer_holds_up_only_who_asks_it() {
    let Some(world) = World::of_scripts() else { return };
    let _server = echo(&world);
    let mut client = world.script(
        "
s = connected(8030)
s.getpeername()
s.sendall(b'x')
s.recv(1) # So it was accepted.
say('connected')
hear()
asking = threading.Thread(target=lambda: told(connected, 8031))
asking.start()
hear()
for _ in range(100):
    with s.dup() as copy: copy.sendall(b'x')
    s.recv(1)
    s.getpeername()
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
say('goes on', asking.is_alive())
asking.join()
say('asked')
",
    );
    assert_eq!(client.says(), "connected");
    world.host.be_silent(true);
    client.hears("ask");
    world.host.wait_for_unanswered(1);
    client.hears("go on");
    assert_eq!(client.says(), "goes on True");
    world.host.be_silent(false);
    assert_eq!(client.says(), "asked");
}

#[test]
fn a_child_asks_though_a_thread_of_its_parent_was_asking() {
    let Some(world) = World::of_scripts() else { return };
    let mut parent = world.script(
        "
listener = listening(8032)
say('listens')
hear()
asking = threading.Thread(target=lambda: told(listener.accept))
asking.start()
hear()
child = os.fork()
listener.setblocking(False)
if not child:
    say('child', told(listener.accept), told(connected, 8033))
    os._exit(0)
say('parent')
hear()
os.waitpid(child, 0)
os._exit(0)
",
    );
    assert_eq!(parent.says(), "listens");
    // A process that waits in accept() finds that its lease is gone, and asks for another.
    world.host.be_silent(true);
    world.host.restart();
    parent.hears("accept");
    world.host.wait_for_unanswered(1);
    parent.hears("fork");
    assert_eq!(parent.says(), "parent");
    world.host.be_silent(false);
    assert_eq!(parent.says(), "child EAGAIN ECONNREFUSED");
}

/// Three workers share a listener, each with an epoll of its own, and say how often they woke.
const PREFORK: &str = "
listener = listening(8034)
listener.setblocking(False)
workers = []
for _ in range(3):
    worker = os.fork()
    if worker: workers.append(worker)
    else:
        epoll = select.epoll()
        epoll.register(listener, select.EPOLLIN)
        wakes = 0
        while True:
            epoll.poll()
            wakes += 1
            try: s, _ = listener.accept()
            except BlockingIOError: continue
            with s:
                s.sendall(f'{wakes}'.encode())
say('listens')
while word := hear():
    worker = workers.pop()
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    say('killed')
";

#[test]
fn workers_of_a_listener_outlive_a_daemon_and_each_other() {
    let Some(world) = World::of_scripts() else { return };
    let mut server = world.script(PREFORK);
    assert_eq!(server.says(), "listens");
    let mut client = world.script(
        "
while hear():
    s = connected(8034)
    say(s.recv(100).decode())
    s.close()
",
    );
    let mut connections = 0;
    let mut come = |many: usize| {
        connections += many;
        let last = (0..many).map(|_| {
            client.hears("connect");
            client.says().parse().expect("a number")
        });
        let wakes: usize = last.last().expect("some");
        assert_eq!(world.host.state().connections, connections, "some went by TCP");
        wakes
    };
    for left in (1..3).rev() {
        world.host.restart();
        world.host.wait_for_listener(8034);
        come(10);
        server.hears("kill one");
        assert_eq!(server.says(), "killed");
        // Each client and each restart wakes all that are left.
        let wakes = come(10);
        assert!(wakes < 150, "one of {left} workers woke {wakes} times");
    }
}

#[test]
fn connections_go_by_toe_while_other_threads_start_programs() {
    let Some(world) = World::of_scripts() else { return };
    let _server = echo(&world);
    let client = world.script(
        "
import subprocess
done = threading.Event()
def starts():
    while not done.is_set(): subprocess.run(['true'])
starting = threading.Thread(target=starts)
starting.start()
for i in range(200): connected(8030).close()
done.set()
starting.join()
say('done')
",
    );
    assert_eq!(client.says(), "done");
    assert_eq!(world.host.state().connections, 200);
}

#[test]
fn who_waits_in_accept_asks_a_new_daemon_for_its_listener() {
    let Some(world) = World::of_scripts() else { return };
    let _server = echo(&world);
    for connections in 1..=3 {
        let client = world.script("s = connected(8030)\ns.sendall(b'x')\nsay(s.recv(1))\n");
        assert_eq!(client.says(), "b'x'");
        drop(client);
        assert_eq!(world.host.state().connections, connections);
        world.host.restart();
        world.host.wait_for_listener(8030);
    }
}

#[test]
fn a_signal_does_not_keep_a_listener_from_being_asked_for() {
    let Some(world) = World::of_scripts() else { return };
    let server = world.script(
        &ECHO
            .replace("say('listens')", "say('listens', os.getpid())")
            .replace("listener = ", "signal.signal(signal.SIGUSR1, lambda *_: None)\nlistener = "),
    );
    let listens = server.says();
    world.host.be_silent(true);
    world.host.restart();
    world.host.wait_for_unanswered(1);
    signal(&listens);
    world.host.be_silent(false);
    world.host.wait_for_listener(8030);
    let client = world.script("s = connected(8030)\ns.sendall(b'x')\nsay(s.recv(1))\n");
    assert_eq!(client.says(), "b'x'");
    assert_eq!(world.host.state().connections, 1);
}

#[test]
fn a_stream_whose_daemon_dies_does_not_end_clean() {
    let Some(world) = World::of_scripts() else { return };
    let server = "
listener = listening(PORT)
say('listens')
s, _ = listener.accept()
while type(told(s.sendall, b'x' * 70001)) is not str: pass
";
    let reader = "
s = connected(PORT)
s.recv(100)
say('reads')
while type(got := told(s.recv, 100000)) is bytes and got: pass
say('then', got)
";
    // The library reads from the library, then the launcher from the launcher.
    let kinds: [fn(&World, &str) -> Script; 2] = [World::script, World::launched_script];
    for (kind, port) in kinds.into_iter().zip(["8042", "8043"]) {
        let server = kind(&world, &server.replace("PORT", port));
        assert_eq!(server.says(), "listens");
        let reader = kind(&world, &reader.replace("PORT", port));
        assert_eq!(reader.says(), "reads");
        world.host.restart();
        assert_eq!(reader.says(), "then ECONNRESET");
    }
}

#[test]
fn one_worker_asks_for_all_of_a_listener() {
    let Some(world) = World::of_scripts() else { return };
    let server = world.script(PREFORK);
    assert_eq!(server.says(), "listens");
    world.host.be_silent(true);
    world.host.state().asked_to_listen = 0;
    world.host.restart();
    world.host.wait_for_unanswered(1);
    // The others serve, and find that there is no lease.
    let client = world.native_script("for _ in range(9): say(connected(8034).recv(100) != b'')\n");
    assert!((0..9).all(|_| client.says() == "True"));
    world.host.be_silent(false);
    world.host.wait_for_listener(8034);
    let client = world.script("for _ in range(9): say(connected(8034).recv(100) != b'')\n");
    assert!((0..9).all(|_| client.says() == "True"));
    let state = world.host.state();
    assert_eq!((state.asked_to_listen, state.connections), (1, 9));
}

#[test]
fn a_listener_goes_through_exec_however_it_was_made_to() {
    let Some(world) = World::of_scripts() else { return };
    let server = world.script(
        "
import fcntl, subprocess
child = '''
import os, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
s, _ = listener.accept()
s.sendall(sys.argv[2].encode())
s.close()
'''
def inherits(fd, how):
    say(how)
    subprocess.run([sys.executable, '-c', child, str(fd), how], close_fds=False, check=True)
one, two, three, four = [listening(port) for port in range(8035, 8039)]
fcntl.ioctl(one, 0x5450) # FIONCLEX
inherits(one.fileno(), 'ioctl')
copy = libc.dup(two.fileno())
two.close()
inherits(copy, 'dup')
libc.dup2(three.fileno(), 50)
inherits(50, 'dup2')
four.set_inheritable(True)
copy = four.dup()
four.set_inheritable(False)
copy.set_inheritable(True)
inherits(copy.fileno(), 'fcntl')
",
    );
    let mut client = world.script(
        "
for port in range(8035, 8039):
    hear()
    say(connected(port).recv(100).decode())
",
    );
    for how in ["ioctl", "dup", "dup2", "fcntl"] {
        assert_eq!(server.says(), how);
        client.hears("connect");
        assert_eq!(client.says(), how);
    }
    assert_eq!(world.host.state().connections, 4);
}

#[test]
fn without_descriptors_to_hide_a_connection_is_native() {
    let Some(world) = World::of_scripts() else { return };
    let _server = echo(&world);
    let native = world.native_script("listener = listening(8040)\nsay('listens')\nhear()\n");
    assert_eq!(native.says(), "listens");
    let client = world.script(
        "
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
kept = [connected(8030) for _ in range(30)]
def later(port):
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex((ip, port))
    select.select([], [s], [])
    return s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
say([later(8040) for _ in range(3)])
",
    );
    assert_eq!(client.says(), "[0, 0, 0]");
    let by_toe = world.host.state().connections;
    assert!((5..30).contains(&by_toe), "{by_toe} by TOE");
}

#[test]
fn an_address_without_a_port_is_kept_on_the_way_back_to_tcp() {
    let Some(world) = World::of_scripts() else { return };
    world.host.state().ips.push(NATIVE);
    // The host has no listener there.
    let native = world.native_script(
        "
listener = listening(8041)
say('listens')
for _ in range(2): say(listener.accept()[1][0] == native)
",
    );
    assert_eq!(native.says(), "listens");
    let _client = world.script(
        "
for blocks in True, False:
    s = socket.socket()
    s.setsockopt(socket.IPPROTO_IP, 24, 1) # IP_BIND_ADDRESS_NO_PORT
    s.bind((native, 0))
    s.setblocking(blocks)
    s.connect_ex((ip, 8041))
    select.select([], [s], [])
    s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
hear()
",
    );
    assert_eq!((native.says(), native.says()), ("True".into(), "True".into()));
}

#[test]
fn a_connection_comes_from_the_address_that_the_route_says() {
    // The VM's addresses, and the one from which a connection to the guest's own address comes: the
    // route says that address. If the host does not know it, the first one that it knows.
    let table = [(&[OTHER, GUEST][..], GUEST), (&[OTHER], OTHER)];
    for (start, (ips, from)) in [World::script, World::launched_script]
        .into_iter()
        .flat_map(|start| table.map(|row| (start, row)))
    {
        let Some(world) = World::of_scripts() else { return };
        world.host.state().ips = ips.to_vec();
        let server = world.script(
            "
listener = listening(8063, '0.0.0.0')
say('listens')
s, peer = listener.accept()
say(peer[0])
s.sendall(b'x')
",
        );
        assert_eq!(server.says(), "listens");
        world.host.wait_for_listener(8063);
        let client = start(&world, "s = connected(8063)\ns.recv(1)\nsay(s.getsockname()[0])\n");
        let from = from.to_string();
        assert_eq!((server.says(), client.says()), (from.clone(), from), "{ips:?}");
        assert_eq!(world.host.state().connections, 1);
    }
}

#[test]
fn sockets_of_another_network_of_the_guest_are_none_of_the_vm() {
    let Some(world) = World::of_scripts() else { return };
    let text = "
assert libc.unshare(0x40000000) == 0
listener = listening(8040, '0.0.0.0')
say('listens')
say(told(socket.socket().connect, (ip, 8041)))
hear()
";
    for script in [World::script, World::launched_script] {
        let script = script(&world, text);
        assert_eq!((script.says(), script.says()), ("listens".into(), "ENETUNREACH".into()));
        let state = world.host.state();
        assert_eq!((state.asked_to_listen, &state.programs[..]), (0, &[][..]));
    }
    // In its own network the same program's sockets are.
    let script = world.script(&text.replace("assert libc.unshare(0x40000000) == 0", ""));
    assert_eq!((script.says(), script.says()), ("listens".into(), "ECONNREFUSED".into()));
    assert_eq!(world.host.state().asked_to_listen, 1);
}

#[test]
fn a_program_that_shuts_both_directions_loses_nothing_that_it_has_written() {
    let Some(world) = World::of_scripts() else { return };
    let mut server = world.script(
        "
listener = listening(8044)
say('listens')
s, _ = listener.accept()
s.sendall(b'x' * 5000)
s.shutdown(socket.SHUT_RDWR)
say('shut', told(s.recv, 100), told(s.send, b'x'))
hear()
",
    );
    assert_eq!(server.says(), "listens");
    let mut client = world.script(
        "
s = connected(8044)
hear()
for _ in range(100): told(s.sendall, b'late' * 1000)
got = 0
while type(more := told(s.recv, 100000)) is bytes and more: got += len(more)
say(got, more)
",
    );
    assert_eq!(server.says(), "shut b'' EPIPE");
    client.hears("write");
    assert_eq!(client.says(), "5000 b''");
    server.hears("close");
}

#[test]
fn who_finds_a_listener_full_waits_by_tcp() {
    for start in [World::script, World::launched_script] {
        let Some(world) = World::of_scripts() else { return };
        // Two clients fill its half for TOE, and two that for TCP. Later clients wait for them.
        let mut server = world.script(
            "
listener = socket.create_server((ip, 8050), backlog=1)
say('listens')
hear()
for _ in range(5):
    s, _ = listener.accept()
    s.sendall(s.recv(1))
",
        );
        assert_eq!(server.says(), "listens");
        world.host.wait_for_listener(8050);
        let client = start(
            &world,
            "
def nonblocking():
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex((ip, 8050))
    writable = select.poll()
    writable.register(s, select.POLLOUT)
    writable.poll(20000)
    say(s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    s.setblocking(True)
    return s
all = [connected(8050) for _ in range(3)] + [nonblocking()]
say('has four')
all.append(connected(8050))
for s in all: s.sendall(b'x')
say([s.recv(9) for s in all] == [b'x'] * 5)
",
        );
        assert_eq!((client.says(), client.says()), ("0".into(), "has four".into()));
        assert_eq!(world.host.state().connections, 2);
        server.hears("accept");
        assert_eq!(client.says(), "True");
    }
}

#[test]
fn a_connect_that_goes_on_by_tcp_has_not_succeeded_before_it_has() {
    let Some(world) = World::of_scripts() else { return };
    // It listens by TCP alone, and while a client waits for its accept() no other is answered.
    let mut native = world.native_script(
        "
listener = socket.socket()
listener.bind((ip, 8045))
listener.listen(0)
first = connected(8045)
say('is full')
hear()
say('accepted', [listener.accept()[1][0] for _ in range(2)] == [ip, ip])
hear()
",
    );
    assert_eq!(native.says(), "is full");
    let mut client = world.script(
        "
error = lambda: errno.errorcode.get(s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
s = socket.socket()
s.setblocking(False)
s.connect_ex((ip, 8045))
writable = select.poll()
writable.register(s, select.POLLOUT)
writable.poll(20000)
say(error(), told(s.getpeername), told(s.send, b'x'), told(s.recv, 1))
hear()
writable.poll(20000)
say(error(), told(s.getpeername) == (ip, 8045))
hear()
",
    );
    assert_eq!(client.says(), "EINPROGRESS ENOTCONN EAGAIN EAGAIN");
    native.hears("accept");
    client.hears("go on");
    assert_eq!((client.says(), native.says()), ("None True".into(), "accepted True".into()));
    assert_eq!(world.host.state().connections, 0);
}

#[test]
fn all_calls_that_read_tell_a_reset_from_an_end() {
    let Some(world) = World::of_scripts() else { return };
    let server = world.script(
        "
listener = listening(8046)
say('listens')
for on in 1, 1, 0, 0:
    s, _ = listener.accept()
    s.sendall(b'five!')
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', on, 0))
    s.close()
",
    );
    assert_eq!(server.says(), "listens");
    let client = world.script(
        "
class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_char_p), ('len', ctypes.c_size_t)]
class Message(ctypes.Structure): _fields_ = [
    ('name', ctypes.c_void_p), ('name_len', ctypes.c_uint), ('parts', ctypes.POINTER(Part)),
    ('count', ctypes.c_size_t), ('control', ctypes.c_void_p), ('control_len', ctypes.c_size_t),
    ('flags', ctypes.c_int), ('pad', ctypes.c_int), ('len', ctypes.c_uint)]
def recvmmsg(fd):
    room = ctypes.create_string_buffer(100)
    part = Part(ctypes.cast(room, ctypes.c_char_p), 100)
    pair = (Message * 2)(*[Message(parts=ctypes.pointer(part), count=1) for _ in range(2)])
    got = libc.recvmmsg(fd, pair, 2, socket.MSG_DONTWAIT, None)
    if got < 0: return errno.errorcode[ctypes.get_errno()]
    return [message.len for message in pair[:got]]
def preadv2(fd):
    return told(os.preadv, fd, [bytearray(100)], -1)
for call in recvmmsg, preadv2, recvmmsg, preadv2:
    s = connected(8046)
    over = select.poll()
    over.register(s, select.POLLRDHUP)
    over.poll(20000)
    say(call(s.fileno()), call(s.fileno()))
",
    );
    let said: Vec<_> = (0..4).map(|_| client.says()).collect();
    assert_eq!(said, ["[5] ECONNRESET", "5 ECONNRESET", "[5] [0, 0]", "5 0"]);
    assert_eq!(world.host.state().connections, 4);
}
