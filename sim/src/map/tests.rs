use std::fs;

use super::measured::read;
use super::place::{Direction, Place, Sharing};
use super::*;

const SMALL: Effort =
    Effort { runs: [3, 1], sizes: &[100_000], round_trips_us: &[10_000], share_sizes: &[100_000] };

#[test]
fn in_whole_slices_transfers_gain_both_ways_and_alone_on_a_core_nothing() {
    for direction in [Direction::Up, Direction::Down] {
        let among = usual(Sharing::Slices { ms: 30 }, 1_000_000, direction);
        let alone = Place { vms: 1, ..among };
        let [among, alone] = gains(&[among, alone], SMALL.runs, 1).try_into().expect("two");
        assert!(among.delivered > 1.5, "{direction:?}: {among:?}");
        assert!((0.9..1.1).contains(&alone.delivered), "{direction:?}: {alone:?}");
    }
}

#[test]
fn two_threads_make_the_same_map_as_one() {
    let places = cells(SMALL);
    assert_eq!(gains(&places, [2, 1], 1), gains(&places, [2, 1], 2));
}

#[test]
fn results_of_the_lab_stand_beside_the_model() {
    let arm = |case: &str, arm: &str, delivered: &[f64]| {
        let sample = |(round, ms): (usize, &f64)| {
            let values = serde_json::json!({ "acked": ms / 2.0, "delivered": ms });
            serde_json::json!({ "round": round, "values": values })
        };
        let samples: Vec<_> = delivered.iter().enumerate().map(sample).collect();
        serde_json::json!({ "case": case, "arm": arm, "samples": samples })
    };
    let (up, other) = ("strict30 over metro: 100 KB up", "rr30 over lan: 100 KB up");
    let arms = [
        arm(up, "tap", &[200.0, 100.0, 300.0]),
        arm(up, "ack-offload", &[50.0, 60.0]),
        arm(other, "tap", &[1.0]),
        arm(other, "ack-offload", &[1.0]),
    ];
    let dir = std::env::temp_dir().join(format!("nightporter-map-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory");
    let path = dir.join("result.json");
    fs::write(&path, serde_json::json!({ "arms": arms }).to_string()).expect("a file");
    draw(SMALL, 1, std::slice::from_ref(&path), &dir).expect("a map");
    let [measured] = read(&path).expect("a result").try_into().expect("the map has one of them");
    assert_eq!((measured.place.bytes, measured.rounds), (100_000, 2));
    assert_eq!(measured.delivered_ms, [200.0, 55.0]);
    let page = fs::read_to_string(dir.join("will-it-help.md")).expect("a page");
    assert!(page.contains("| strict30 over metro: 100 KB up | 2 | 200 → 55 | 3.6 |"), "{page}");
    for picture in ["idea.svg", "gain.svg"] {
        let svg = fs::read_to_string(dir.join("img").join(picture)).expect("a picture");
        assert!(svg.contains("<polyline"), "{picture} has curves");
    }
    fs::write(&path, "{}").expect("a file");
    let error = read(&path).expect_err("no result").to_string();
    assert!(error.ends_with("is no result of nightporter-lab demo"), "{error}");
    fs::remove_dir_all(&dir).expect("it goes");
}
