//! The command as its user meets it: output, exit codes, files.

use std::path::PathBuf;
use std::process::{Command, Output};

use nightporter_check::rule::{Rule, Violation};
use nightporter_core::time::Instant;
use nightporter_sim::plan::{Plan, Workload};
use nightporter_sim::run::Failure;

/// A folder of its own that goes when the test does.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("sim-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn sim(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nightporter-sim")).args(args).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn one_seed_is_the_same_in_every_run_and_alone_or_beside_others() {
    let [a, b] = [(); 2].map(|()| text(&sim(&["run", "--seed", "3"]).stdout));
    assert!(a.contains("nothing found") && a.contains("trace "), "{a}");
    assert_eq!(a, b);
    let other = text(&sim(&["run", "--seed", "4"]).stdout);
    assert_ne!(a, other);
    let many = sim(&["run", "--seeds", "6", "--jobs", "3"]);
    assert_eq!(many.status.code(), Some(0));
    assert!(text(&many.stdout).starts_with("6 seeds, 0 failed: "));
}

#[test]
fn what_hangs_is_told_with_its_packets_its_plan_and_both_captures_and_made_smaller() {
    let folder = Folder::new("hangs");
    let out = folder.0.to_str().expect("a name");
    let plan_path = folder.0.join("hopeless.json");
    let hopeless = |seed| {
        let mut plan = Plan::from_seed(seed);
        plan.give_up_at = plan.heal_at;
        for conn in &mut plan.conns {
            (conn.workload, conn.opens_at) = (Workload::Idle { idle_s: 400 }, Instant::ZERO);
        }
        nightporter_sim::run::run_plan(&plan).is_err().then_some(plan)
    };
    let plan = (0..100).find_map(hopeless).expect("one of them hangs");
    std::fs::write(&plan_path, serde_json::to_vec(&plan).expect("plain data")).expect("written");
    let ran =
        sim(&["run", "--plan", plan_path.to_str().expect("a name"), "--out", out, "--shrink"]);
    let said = text(&ran.stdout);
    assert_eq!(ran.status.code(), Some(12), "liveness: {said}");
    assert!(said.contains(&format!("seed {}: INV-18: hangs", plan.seed)), "{said}");
    assert!(said.contains(">G") && said.contains("G>"), "packets of both directions: {said}");
    assert!(said.contains(" left\n"), "{said}");
    for file in ["hopeless-remote.pcap", "hopeless-guest.pcap", "hopeless-small.json"] {
        assert!(folder.0.join(file).metadata().expect("it is there").len() > 100, "{file}");
    }
    let small = folder.0.join("hopeless-small.json");
    let again = sim(&["run", "--plan", small.to_str().expect("a name"), "--out", out]);
    assert_eq!(again.status.code(), Some(12), "the smaller plan fails in the same way");
}

#[test]
fn exit_codes_tell_crash_safety_and_liveness_apart() {
    let violation = |rule| Violation { rule, what: String::new(), flow: None };
    let codes = [
        Failure::Crash(String::new()),
        Failure::Safety(violation(Rule::Held)),
        Failure::Liveness(violation(Rule::Liveness)),
    ];
    assert_eq!(codes.map(|failure| failure.exit_code()), [10, 11, 12]);
    assert_eq!(sim(&["run", "--seeds", "many"]).status.code(), Some(2));
    let missing = sim(&["run", "--plan", "/nowhere/plan.json"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(text(&missing.stderr).contains("/nowhere/plan.json"), "{missing:?}");
}

#[test]
fn a_long_run_says_how_far_it_is_and_what_came_of_it() {
    let folder = Folder::new("long");
    let state = folder.0.join("state.json");
    let state = state.to_str().expect("a name");
    let ran = sim(&["long", "--seeds", "3", "--state", state]);
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    assert!(text(&ran.stderr).contains("3 of 3 seeds, "), "{ran:?}");
    assert!(text(&ran.stdout).contains("| seeds with a violation | 0 |"), "{ran:?}");
    let again = sim(&["long", "--seeds", "3", "--state", state]);
    assert_eq!(text(&again.stderr), "", "nothing was left to do");
}
