//! What a program sees under the launcher when something goes wrong.

use crate::World;

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
