//! A daemon that is away.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nightporter_attach::Held;
use nightporter_attach::area::Plain;

use super::frames::{Passing, WHOLE, number_of, numbered, passing};
use super::world::{ALL, PATIENCE, SIDES, SLOT, Side, WAYS, World};

const LIMIT: Duration = Duration::from_millis(20);
/// So long a frame that has a way needs at most.
const SOON: Duration = Duration::from_millis(1);

fn plain(world: &World, from: Side) -> u64 {
    let Plain { from_vm, from_net, .. } = world.view.plain(SLOT);
    if from == Side::Vm { from_vm } else { from_net }
}

/// Sends numbered frames from `first` on until one arrives although the daemon does nothing. The
/// number of the next, and the numbers that arrived.
fn until_plain(world: &World, from: Side, first: u64) -> (u64, BTreeSet<u64>) {
    let deadline = Instant::now() + PATIENCE;
    for number in first.. {
        assert!(Instant::now() < deadline, "nothing passes");
        assert!(world.send(from, &numbered(number)));
        if let Some(frame) = world.receive(from.other(), SOON, false) {
            return (number + 1, BTreeSet::from([number_of(&frame).unwrap()]));
        }
    }
    unreachable!("the deadline")
}

#[test]
fn a_daemon_that_stands_is_a_plain_wire_and_frames_are_turned_again_when_it_goes_on() {
    for (way, from) in WAYS.into_iter().flat_map(|way| SIDES.map(|side| (way, side))) {
        World::run(ALL, LIMIT, move |mut world| {
            world.attach(way).unwrap();
            let began = Instant::now();
            let (next, mut came) = until_plain(&world, from, 0);
            assert!(began.elapsed() >= LIMIT, "{way:?} {from:?}: before the limit");
            assert!(next > 1, "the first was turned");
            // The wire stays plain, and nothing is lost on it.
            for number in next..next + 500 {
                world.send(from, &numbered(number));
                let frame = world.receive(from.other(), PATIENCE, false).unwrap();
                assert!(came.insert(number_of(&frame).unwrap()), "twice");
            }
            assert_eq!(plain(&world, from), came.len() as u64, "each that passed is counted");
            // Those that were turned before come late, and none twice.
            let all = next + 500;
            while (came.len() as u64) < all {
                let frame = world.receive(from.other(), PATIENCE, true).unwrap();
                assert!(came.insert(number_of(&frame).unwrap()), "twice");
            }
            let before = plain(&world, from);
            world.send(from, &numbered(all));
            assert!(world.receive(from.other(), SOON, false).is_none(), "it is turned");
            let frame = world.receive(from.other(), PATIENCE, true).unwrap();
            assert_eq!((number_of(&frame), plain(&world, from)), (Some(all), before));
        });
    }
}

#[test]
fn all_frames_of_a_tap_pass_plain_and_are_counted_as_long_as_the_daemon_wants_none() {
    for (way, from) in WAYS.into_iter().flat_map(|way| SIDES.map(|side| (way, side))) {
        World::run(ALL, PATIENCE, move |mut world| {
            world.attach(way).unwrap();
            world.view.set_plain(SLOT, true);
            for number in 0..50 {
                world.send(from, &numbered(number));
                let frame = world.receive(from.other(), PATIENCE, false).unwrap();
                assert_eq!(number_of(&frame), Some(number));
            }
            assert_eq!(plain(&world, from), 50);
            world.view.set_plain(SLOT, false);
            world.send(from, &numbered(50));
            assert!(world.receive(from.other(), SOON, false).is_none(), "it is turned");
            let frame = world.receive(from.other(), PATIENCE, true).unwrap();
            assert_eq!((number_of(&frame), plain(&world, from)), (Some(50), 50));
        });
    }
}

#[test]
fn segments_that_pass_plain_mark_their_connection_and_what_cannot_be_read_is_counted() {
    for (way, from) in WAYS.into_iter().flat_map(|way| SIDES.map(|side| (way, side))) {
        World::run(ALL, LIMIT, move |mut world| {
            world.attach(way).unwrap();
            let (mut number, _) = until_plain(&world, from, 0);
            // From the network a bridge that looks into IP takes none with wrong sums.
            let those = if from == Side::Vm { usize::MAX } else { WHOLE };
            for Passing { name, bytes, ends, is_syn, is_read } in passing().into_iter().take(those)
            {
                let before = world.view.plain(SLOT);
                assert!(world.send(from, &bytes));
                assert!(world.send(from, &numbered(number)));
                while world.receive(from.other(), PATIENCE, false).as_deref().and_then(number_of)
                    != Some(number)
                {}
                number += 1;
                let since = world.view.plain(SLOT).since(&before);
                let sent = (bytes.len() + numbered(0).len() - 2 * 10) as u64;
                let without_tag = sent - 4; // the kernel has the outermost one elsewhere
                assert!((without_tag..=sent).contains(&since.bytes), "{name}: {}", since.bytes);
                assert_eq!(since.unread, u64::from(!is_read), "{name}");
                let marked = world.view.take_marked();
                for ends in ends.iter().flat_map(|[a, b]| [[*a, *b], [*b, *a]]) {
                    assert!(marked.has_segment(ends), "{name}");
                    assert_eq!(marked.has_syn(ends), is_syn, "{name}");
                    let other = SocketAddr::new(ends[1].ip(), ends[1].port() + 1);
                    assert!(!marked.has_segment([ends[0], other]), "{name}");
                }
                assert_eq!(marked.is_empty(), ends.is_none(), "{name}");
                assert!(world.view.take_marked().is_empty(), "they are taken");
            }
        });
    }
}

#[test]
fn a_daemon_that_slept_long_because_there_was_nothing_to_do_is_awake() {
    World::run(ALL, LIMIT, |mut world| {
        world.attach(WAYS[0]).unwrap();
        world.send(Side::Vm, &numbered(1));
        world.receive(Side::Network, PATIENCE, true).unwrap();
        assert!(world.receive(Side::Network, LIMIT * 3, true).is_none());
        world.send(Side::Vm, &numbered(2));
        assert!(world.receive(Side::Network, SOON, false).is_none(), "it is turned");
        world.receive(Side::Network, PATIENCE, true).unwrap();
        assert_eq!(plain(&world, Side::Vm), 0);
    });
}

#[test]
fn a_daemon_that_ends_is_a_plain_wire() {
    for way in WAYS {
        World::run(ALL, LIMIT, move |mut world| {
            world.attach(way).unwrap();
            world.send(Side::Vm, &numbered(0));
            world.receive(Side::Network, PATIENCE, true).unwrap();
            // As the kernel does it for a process that is killed: filters stay.
            let filters = match world.daemon.take().unwrap().held {
                Held::Links(links) => {
                    drop(links);
                    None
                }
                Held::Filters(filters) => Some(filters),
            };
            let began = Instant::now();
            for side in SIDES {
                until_plain(&world, side, 1);
            }
            let Some(filters) = filters else {
                assert_eq!(world.view.plain(SLOT), Plain::default(), "no program is left");
                return;
            };
            assert!(began.elapsed() >= LIMIT);
            filters.remove().unwrap();
            let before = world.view.plain(SLOT);
            for side in SIDES {
                world.send(side, &numbered(9));
                world.receive(side.other(), PATIENCE, false).unwrap();
            }
            assert_eq!(world.view.plain(SLOT), before, "nothing counts any more");
        });
    }
}
