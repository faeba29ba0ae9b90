//! Attaching and detaching, what is in the way of it, and taps that go.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use nightporter_attach::{AttachError, Hooks, Request, Way, attach};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::frames::{number_of, numbered};
use super::world::{ALL, PATIENCE, SIDES, SLOT, WAYS, World, run};

/// The longest.
const LIMIT: Duration = Duration::from_secs(1);
/// Frames of each side that are under way at a time.
const UNDER_WAY: u64 = 20;
/// Frames of each side that may still be under way when more are sent.
const MISSING_MAX: usize = 60;

#[test]
fn no_frame_is_lost_doubled_or_overtaken_when_a_tap_is_attached_and_detached() {
    for way in WAYS {
        World::run(ALL, LIMIT, move |mut world| {
            // Each processor has a queue of frames that have come in, in order.
            let mut one = CpuSet::new();
            one.set(0).unwrap();
            sched_setaffinity(Pid::from_raw(0), &one).unwrap();
            let mut next = 0;
            let mut send = |world: &World| {
                world.view.wake(); // on a busy machine a second may have passed
                (next..next + UNDER_WAY).for_each(|number| {
                    SIDES.iter().for_each(|side| assert!(world.send(*side, &numbered(number))));
                });
                next += UNDER_WAY;
                next
            };
            let mut got = [0; 2];
            let mut receive = |world: &World, until: u64| {
                for (side, got) in SIDES.into_iter().zip(&mut got) {
                    while *got < until {
                        let frame = world.receive(side.other(), PATIENCE, true).unwrap();
                        assert_eq!(number_of(&frame), Some(*got), "{way:?} from {side:?}");
                        *got += 1;
                    }
                }
            };
            for _ in 0..20 {
                let sent = send(&world); // on their way by either wire
                world.attach(way).unwrap();
                send(&world);
                let turned = send(&world);
                receive(&world, sent);
                receive(&world, turned);
                world.detach();
                let plain = send(&world);
                receive(&world, plain);
            }
        });
    }
}

#[test]
fn no_frame_is_lost_or_doubled_when_a_tap_is_attached_and_detached_amid_frames() {
    for way in WAYS {
        World::run(ALL, LIMIT, move |mut world| {
            let (mut sent, mut missing) = (0, [BTreeSet::new(), BTreeSet::new()]);
            let mut step = |world: &World| {
                world.view.wake();
                for (side, missing) in SIDES.into_iter().zip(&mut missing) {
                    (sent..sent + UNDER_WAY).for_each(|number| {
                        assert!(world.send(side, &numbered(number)) && missing.insert(number));
                    });
                    while missing.len() > MISSING_MAX {
                        let frame = world.receive(side.other(), PATIENCE, true).unwrap();
                        let number = number_of(&frame).unwrap();
                        assert!(missing.remove(&number), "{way:?} from {side:?}: {number} twice");
                    }
                }
                sent += UNDER_WAY;
            };
            for _ in 0..20 {
                step(&world);
                world.attach(way).unwrap();
                step(&world);
                step(&world);
                world.detach();
                step(&world);
            }
            for (side, missing) in SIDES.into_iter().zip(&mut missing) {
                while !missing.is_empty() {
                    let frame = world.receive(side.other(), PATIENCE, true);
                    let number = frame.as_ref().and_then(|frame| number_of(frame));
                    let is_missing = number.is_some_and(|number| missing.remove(&number));
                    assert!(is_missing, "{way:?} from {side:?}: {number:?} of {missing:?}");
                }
            }
        });
    }
}

#[test]
fn an_ingress_qdisc_excludes_filters_and_not_links() {
    World::run(ALL, LIMIT, |mut world| {
        run("tc", "qdisc add dev vm0 ingress");
        let refused = world.attach(Way::Clsact).unwrap_err();
        assert!(matches!(refused, AttachError::IngressQdisc), "{refused}");
        assert!(refused.to_string().contains("fix: remove the inbound <bandwidth>"), "{refused}");
        world.attach(Way::Tcx).unwrap();
        world.send(SIDES[0], &numbered(1));
        world.receive(SIDES[1], PATIENCE, true).unwrap();
    });
}

#[test]
fn a_refusal_takes_no_filter_of_others_away() {
    World::run(ALL, LIMIT, |mut world| {
        run("tc", "qdisc add dev vm0 clsact");
        let tc = |arguments: &[&str]| {
            let output = Command::new("tc").args(arguments).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        let rest = ["protocol", "all", "pref", "1", "handle", "1", "bpf", "bytecode", "1,6 0 0 0"];
        tc(&[&["filter", "add", "dev", "vm0", "egress"][..], &rest].concat());
        let refused = world.attach(Way::Clsact).unwrap_err();
        assert!(matches!(refused, AttachError::Filter), "{refused}");
        assert!(tc(&["filter", "show", "dev", "vm0", "egress"]).contains("bpf"));
        assert_eq!(tc(&["filter", "show", "dev", "vm0", "ingress"]), "", "ours is gone");
    });
}

#[test]
fn a_tap_is_one_daemons_and_what_a_dead_one_has_left_goes() {
    for way in WAYS {
        World::run(ALL, LIMIT, move |mut world| {
            world.attach(way).unwrap();
            let hooks = Hooks::by(way).unwrap();
            let request = Request { index: world.index(), slot: SLOT + 1, mark: 3 };
            let attach_again = |world: &World| attach(&hooks, &world.area, &request);
            let refused = attach_again(&world).unwrap_err();
            assert!(matches!(refused, AttachError::Claimed(_)), "{refused}");
            hooks.take_left(world.index()).unwrap(); // it is in use
            world.send(SIDES[0], &numbered(1));
            world.receive(SIDES[1], PATIENCE, true).expect("by the daemon");
            // It is killed: the kernel closes all that it had, and takes nothing else away.
            drop(world.daemon.take());
            drop(attach_again(&world).unwrap());
            hooks.take_left(world.index()).unwrap();
            for hook in ["ingress", "egress"] {
                let arguments = ["filter", "show", "dev", "vm0", hook];
                let output = Command::new("tc").args(arguments).output().unwrap();
                assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
            }
            world.send(SIDES[0], &numbered(2));
            let frame = world.receive(SIDES[1], PATIENCE, false).expect("a plain wire");
            assert_eq!(number_of(&frame), Some(2));
        });
    }
}

#[test]
fn a_tap_that_has_gone_is_not_attached_and_one_of_its_name_is_plain() {
    World::run(ALL, LIMIT, |mut world| {
        let index = world.index();
        world.attach(Way::Tcx).unwrap();
        world.restart_vmm(ALL);
        for side in SIDES {
            world.send(side, &numbered(1));
            world.receive(side.other(), PATIENCE, false).unwrap();
        }
        drop(world.daemon.take());
        for way in WAYS {
            let request = Request { index, slot: SLOT, mark: 1 };
            let refused = attach(&Hooks::by(way).unwrap(), &world.area, &request).unwrap_err();
            assert!(matches!(refused, AttachError::NoInterface), "{way:?}: {refused}");
        }
        world.attach(Way::Tcx).unwrap();
        for side in SIDES {
            world.send(side, &numbered(2));
            let frame = world.receive(side.other(), PATIENCE, true).unwrap();
            assert_eq!(number_of(&frame), Some(2));
        }
    });
}

#[test]
fn this_kernel_has_links() {
    World::run(ALL, LIMIT, |_| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(['.', '-']).map(|it| it.parse().unwrap_or(0));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let has_links = Way::of_this_kernel().unwrap() == Way::Tcx;
        assert_eq!(has_links, version >= (6, 6), "{release}");
    });
}
