//! Programs whose host is away, as a socket device without a daemon.

use crate::World;
use crate::script::Script;

/// Connects all the time, and says whether no connect() took long. Then a child does the same.
const BUSY: &str = "
say(told(connected, 8061))
def connects(seconds):
    longest, end = 0, time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        told(connected, 8061)
        longest = max(longest, time.monotonic() - began)
        select.poll().poll(10)
    say(longest < 3)
for seconds in 4.5, 1.5:
    hear()
    connects(seconds)
hear()
if child := os.fork(): os.waitpid(child, 0)
else:
    connects(0.5)
    os._exit(0)
hear()
";

fn tries_ever_more_rarely(start: fn(&World, &str) -> Script) {
    let Some(world) = World::of_scripts() else { return };
    let mut client = start(&world, BUSY);
    assert_eq!(client.says(), "ECONNREFUSED");
    world.host.be_away(true);
    world.host.restart();
    let mut attempts = || {
        client.hears("connect");
        assert_eq!(client.says(), "True", "a connect() has waited too long");
        world.host.state().attempts
    };
    // An attempt takes a second here. Between the first two there is one second, then there are
    // two; if it was one again, there would be three attempts.
    let before = attempts();
    assert!((1..=2).contains(&before), "{before} attempts");
    // After the next there are four.
    let before = attempts();
    assert_eq!(attempts(), before, "a child has tried again");
}

#[test]
fn a_host_that_is_away_is_tried_ever_more_rarely() {
    tries_ever_more_rarely(World::script);
}

#[test]
fn a_host_that_is_away_is_tried_ever_more_rarely_by_the_launcher() {
    tries_ever_more_rarely(World::launched_script);
}

#[test]
fn a_host_that_has_come_back_is_found() {
    for start in [World::script, World::launched_script] {
        let Some(world) = World::of_scripts() else { return };
        let server = world.script(
            "
listener = listening(8064)
say('listens')
while True:
    s, _ = listener.accept()
    s.sendall(b'x')
    s.close()
",
        );
        assert_eq!(server.says(), "listens");
        world.host.be_away(true);
        let client = start(
            &world,
            "
while True:
    with connected(8064) as s: s.recv(1)
    say('again')
",
        );
        assert_eq!(client.says(), "again");
        assert_eq!(world.host.state().connections, 0);
        world.host.be_away(false);
        while world.host.state().connections == 0 {
            assert_eq!(client.says(), "again");
        }
    }
}

#[test]
fn who_listens_when_a_host_has_come_back_is_found_by_it_although_connections_pause() {
    for start in [World::script, World::launched_script] {
        let Some(world) = World::of_scripts() else { return };
        world.host.be_away(true);
        // Three attempts, after the last of which there are four seconds.
        let mut server = start(
            &world,
            "
for pause in 1100, 2100, 0:
    told(connected, 8066)
    select.poll().poll(pause)
say('pauses')
hear()
listener = listening(8066)
hear()
",
        );
        assert_eq!(server.says(), "pauses");
        world.host.be_away(false);
        server.hears("listen");
        world.host.wait_for_listener(8066);
    }
}
