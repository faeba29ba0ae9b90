use super::measure::{Clock, Ping, Transfer, millis, pings, quantile, transfers, world};
use super::scene::{Mode, Scene};
use super::*;

const SMALL: Effort = Effort {
    pings: 60,
    transfers: 15,
    runs: [3, 1],
    sizes: &[50_000, 100_000],
    sweep: &[20_000, 70_000],
};

fn some(scene: &Scene, runs: u64) -> Vec<Transfer> {
    (0..runs).flat_map(|seed| transfers(scene, seed)).collect()
}

#[test]
fn a_vm_among_three_waits_in_steps_of_a_slice() {
    let pings = pings(&Scene::new(3, Mode::Plain, 1), 1, 200);
    let near = |p: &&Ping| {
        let steps = millis(p.in_guest) / 30.0;
        (steps - steps.round()).abs() * 30.0 < 1.0
    };
    let step = |n: f64| {
        pings.iter().filter(near).filter(|p| (millis(p.in_guest) / 30.0).round() == n).count()
    };
    assert!(pings.iter().filter(near).count() > 160, "most wait whole slices");
    assert!(step(0.0) > 20 && step(1.0) > 20 && step(2.0) > 10, "0, 30 and 60 ms are common");
    assert!(pings.iter().all(|p| millis(p.in_host) < 0.45), "the driver domain is quick");
}

#[test]
fn the_round_trip_grows_with_the_number_of_vms() {
    let of = |vms| mean(&round_trips(&pings(&Scene::new(vms, Mode::Plain, 1), 1, 200)));
    let [one, two, three, five] = [1, 2, 3, 5].map(of);
    assert!(one < 1.0, "alone: {one} ms");
    assert!(two > 10.0 && three > two && five > three + 10.0, "{two} {three} {five}");
}

#[test]
fn with_two_vms_and_more_offload_has_everything_acknowledged_earlier() {
    for vms in [2, 3, 5] {
        for bytes in [50_000, 100_000] {
            let of = |mode| {
                let all = some(&Scene::new(vms, mode, bytes), 21);
                [Clock::Acked, Clock::ConnectAcked].map(|clock| median(&all, bytes, clock))
            };
            let [plain, deep, offload] = Mode::ALL.map(of);
            for (clock, without) in plain.into_iter().zip(deep).enumerate() {
                let without = without.0.max(without.1);
                assert!(without < offload[clock], "{vms} VMs, {bytes}: {without} {offload:?}");
            }
        }
    }
}

#[test]
fn with_a_core_for_the_driver_domain_offload_delivers_earlier_too() {
    for (letter, _, scene) in panels().into_iter().filter(|(letter, ..)| "ai".contains(*letter)) {
        let of = |mode| {
            let scene = Scene { mode, bytes: 100_000, ..scene };
            median(&some(&scene, 21), scene.bytes, Clock::Delivered)
        };
        let [plain, deep, offload] = Mode::ALL.map(of);
        assert!(plain.max(deep) < offload, "6({letter}): {plain} {deep} {offload}");
    }
}

#[test]
fn the_driver_domain_gets_a_file_sooner_than_a_vm() {
    let [own, vm, offloaded] = run_traces(&SMALL, 2).try_into().expect("three traces");
    assert!(own.took[1] < vm.took[1], "{:?} {:?}", own.took, vm.took);
    assert!(offloaded.took[0] < vm.took[0], "{:?} {:?}", offloaded.took, vm.took);
    assert!((own.points.last().expect("points").1 - 1.0).abs() < 0.001, "1 MB");
}

#[test]
fn what_is_drawn_keeps_every_invariant() {
    for (letter, _, scene) in panels() {
        let scene = Scene { mode: Mode::Offload, bytes: 60_000, ..scene };
        let end = world(&scene.plan(5), true, None).run();
        assert_eq!(end.violation, None, "6({letter})");
    }
}

#[test]
fn the_same_files_come_out_on_any_number_of_threads() {
    let dir = std::env::temp_dir().join(format!("nightporter-figures-{}", std::process::id()));
    let files = |jobs: usize| {
        let out = dir.join(jobs.to_string());
        draw(&SMALL, jobs, &out).expect("drawn");
        let mut files: Vec<_> = std::fs::read_dir(&out)
            .expect("a directory")
            .map(|entry| entry.expect("an entry"))
            .map(|e| (e.file_name(), std::fs::read_to_string(e.path()).expect("text")))
            .collect();
        files.sort();
        files
    };
    let (one, three) = (files(1), files(3));
    std::fs::remove_dir_all(&dir).expect("ours to remove");
    assert_eq!(one.len(), 8);
    for ((name, a), (_, b)) in one.iter().zip(&three) {
        assert_eq!(a, b, "{name:?}");
        let svg = name.to_string_lossy().ends_with(".svg");
        assert!(!svg || a.starts_with("<svg") && a.ends_with("</svg>\n"), "{name:?}");
    }
}

#[test]
fn a_quantile_is_one_of_the_values() {
    let values = [3.0, 1.0, 2.0];
    assert_eq!([0.0, 0.5, 1.0].map(|share| quantile(&values, share)), [1.0, 2.0, 3.0]);
}

/// On a host of today who is preempted goes on where it was, and nobody preempts for the driver
/// domain: nothing makes the receiving VM wait while data comes.
#[test]
fn on_a_host_of_today_offload_delivers_small_transfers_earlier_with_any_number_of_vms() {
    for (letter, _, scene) in panels_today().into_iter().filter(|(letter, ..)| *letter != 'g') {
        let of = |mode| {
            let scene = Scene { mode, bytes: 50_000, ..scene };
            let all = some(&scene, 21);
            quantile(&all.iter().map(|t| millis(t.delivered)).collect::<Vec<_>>(), 0.5)
        };
        let [without, with] = COMPARED.map(of);
        assert!(with * 1.2 < without, "({letter}): {without} ms and {with}");
    }
}
