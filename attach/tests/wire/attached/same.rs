//! Frame by frame, an attached tap carries what it carried before.

use std::time::Duration;

use nightporter_attach::Way;
use nightporter_attach::area::Plain;

use super::frames::{Kind, all, forget_fragmentation, number_of, numbered};
use super::world::{ALL, NO_USO, NOTHING, PATIENCE, SIDES, SLOT, Side, World};

/// The frames into which each kind of frame turns on its way from a side, in order.
fn arrivals(world: &World, from: Side, kinds: &[Kind]) -> Vec<Vec<Vec<u8>>> {
    let arrivals = (0..).zip(kinds).map(|(number, kind)| {
        world.send(from, &kind.bytes);
        assert!(world.send(from, &numbered(number)));
        let mut came = Vec::new();
        loop {
            let frame = world.receive(from.other(), PATIENCE, true);
            let frame = frame.unwrap_or_else(|| panic!("{}: the wire is silent", kind.name));
            match number_of(&frame) {
                Some(it) if it == number => return came,
                _ => came.push(frame),
            }
        }
    });
    arrivals.collect()
}

fn compare(offloads: u64, way: Way) {
    World::run(offloads, Duration::from_secs(1), move |mut world| {
        let kinds = all();
        let direct = SIDES.map(|side| arrivals(&world, side, &kinds));
        for (n, kind) in kinds.iter().enumerate() {
            // A bridge keeps pause frames to itself.
            let passes = kind.name != "pause";
            assert!(direct.iter().all(|it| it[n].is_empty() != passes), "{} without us", kind.name);
        }
        world.attach(way).unwrap();
        let attached = SIDES.map(|side| arrivals(&world, side, &kinds));
        world.detach();
        let after = SIDES.map(|side| arrivals(&world, side, &kinds));
        for (at, side) in SIDES.iter().enumerate() {
            for (n, kind) in kinds.iter().enumerate() {
                let mut same = [&direct, &attached, &after].map(|it| it[at][n].clone());
                if kind.is_ufo {
                    same.iter_mut().flatten().for_each(|frame| forget_fragmentation(frame));
                }
                let [before, during, after] = &same;
                let name = format!("{} from {side:?}, {way:?}", kind.name);
                assert!(before == during, "{name}: {}", difference(before, during));
                assert!(before == after, "{name}, after it was detached");
            }
        }
        assert_eq!(world.view.plain(SLOT), Plain::default(), "all were turned");
    });
}

/// Lengths and beginnings of the frames.
fn difference(before: &[Vec<u8>], during: &[Vec<u8>]) -> String {
    let show = |frames: &[Vec<u8>]| {
        let one =
            |frame: &Vec<u8>| format!("{} {:02x?}", frame.len(), &frame[..frame.len().min(60)]);
        frames.iter().map(one).collect::<Vec<_>>().join("\n")
    };
    format!("without us:\n{}\nattached:\n{}", show(before), show(during))
}

#[test]
fn frames_are_the_same_for_a_reader_that_takes_everything() {
    compare(ALL, Way::Tcx);
}

#[test]
fn frames_are_the_same_for_a_reader_without_uso() {
    compare(NO_USO, Way::Tcx);
}

#[test]
fn frames_are_the_same_for_a_reader_without_offloads() {
    compare(NOTHING, Way::Tcx);
}

#[test]
fn frames_are_the_same_by_filters() {
    compare(ALL, Way::Clsact);
}
