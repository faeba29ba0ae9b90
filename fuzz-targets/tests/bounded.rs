//! Every target on a stable compiler: its seeds, mutations of them, and noise, the same in every
//! run. Each test takes a second or two; `make fuzz` takes as long as it is given.

use nightporter_fuzz_targets::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

/// A few bytes overwritten, inserted, removed or repeated, as a fuzzer would try first.
#[derive(Clone, Debug)]
enum Change {
    Set(prop::sample::Index, u8),
    Flip(prop::sample::Index, u8),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index, usize),
    Repeat(prop::sample::Index, usize),
    Truncate(prop::sample::Index),
}

fn any_change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    let bytes = prop::collection::vec(any::<u8>(), 1..12);
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        4 => (at(), 0..8_u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        2 => (at(), bytes).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        1 => (at(), 1..16_usize).prop_map(|(at, len)| Change::Remove(at, len)),
        1 => (at(), 1..64_usize).prop_map(|(at, len)| Change::Repeat(at, len)),
        1 => at().prop_map(Change::Truncate),
    ]
}

impl Change {
    fn apply(&self, input: &mut Vec<u8>) {
        let len = input.len();
        let place = |at: &prop::sample::Index| at.index(len.max(1)).min(len);
        let range = |at: &prop::sample::Index, n: usize| place(at)..len.min(place(at) + n);
        match self {
            Self::Set(at, byte) => {
                input.iter_mut().skip(place(at)).take(1).for_each(|b| *b = *byte);
            }
            Self::Flip(at, bit) => {
                input.iter_mut().skip(place(at)).take(1).for_each(|b| *b ^= 1 << bit);
            }
            Self::Insert(at, bytes) => {
                input.splice(place(at)..place(at), bytes.iter().copied());
            }
            Self::Remove(at, n) => {
                input.drain(range(at, *n));
            }
            Self::Repeat(at, n) => {
                let again = input[range(at, *n)].to_vec();
                input.splice(place(at)..place(at), again);
            }
            Self::Truncate(at) => input.truncate(place(at)),
        }
    }
}

fn any_input(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let mutated = (prop::sample::select(seeds), prop::collection::vec(any_change(), 0..8));
    let mutated = mutated.prop_map(|(mut input, changes)| {
        changes.iter().for_each(|change| change.apply(&mut input));
        input
    });
    prop_oneof![3 => mutated, 1 => prop::collection::vec(any::<u8>(), 0..2000)]
}

fn survives(name: &str, cases: u32) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target of this name");
    let seeds = (target.seeds)();
    seeds.iter().for_each(|seed| (target.run)(seed));
    // cargo-fuzz makes inputs smaller, and better.
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 0,
        ..ProptestConfig::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let outcome = runner.run(&any_input(seeds), |input| {
        (target.run)(&input);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{name}: {failure}");
    }
}

#[test]
fn frames_of_any_content_are_survived() {
    survives("wire", 6000);
}

#[test]
fn what_a_router_says_of_a_segment_is_read_as_it_was_meant() {
    survives("icmp", 4000);
}

#[test]
fn translated_frames_keep_their_sums_and_can_be_translated_back() {
    survives("translate", 4000);
}

#[test]
fn whatever_passes_a_list_of_addresses_speaks_for_its_guest_alone() {
    survives("claims", 6000);
}

#[test]
fn packets_of_sockets_in_memory_of_any_content_are_survived() {
    survives("packets", 1500);
}

#[test]
fn strangers_are_answered_and_the_broker_opens_nothing_but_interfaces() {
    survives("requests", 3000);
}

#[test]
fn whatever_goes_through_a_tunnel_takes_the_path_and_comes_out_as_a_frame() {
    survives("overlay", 4000);
}

#[test]
fn no_peer_and_no_stranger_makes_the_path_to_another_narrow() {
    survives("probes", 500);
}

#[test]
fn no_remote_makes_a_sender_send_more_than_its_window_or_stop() {
    survives("sender", 2000);
}

#[test]
fn no_guest_and_no_host_that_lies_about_sockets_hurts_others() {
    survives("sockets", 2000);
}

#[test]
fn whatever_another_host_says_in_a_stream_is_read_as_it_was_said_or_not_at_all() {
    survives("streams", 1000);
}

#[test]
fn whatever_another_host_says_by_tls_is_read_as_it_was_said_and_costs_a_turn_what_it_may() {
    survives("sealed", 150);
}

#[test]
fn whatever_another_host_or_a_file_shows_proves_what_is_in_it() {
    survives("trust", 1500);
}

#[test]
fn whatever_a_helper_says_is_taken_as_it_was_said_and_leaves_no_descriptor() {
    survives("helpers", 3000);
}

#[test]
fn whatever_etcd_says_is_read_as_it_was_said_or_is_nobodys() {
    survives("etcd", 1500);
}

#[test]
fn an_arena_in_any_state_is_taken_over_or_refused() {
    survives("arena", 800);
}

#[test]
fn connections_from_a_host_that_lies_are_refused_or_go_on() {
    survives("images", 3000);
}

#[test]
fn every_configuration_is_right_or_refused_with_words_that_help() {
    survives("config", 1500);
}

#[test]
fn no_sequence_of_operations_loses_a_byte_of_a_flow() {
    survives("flow", 800);
}

#[test]
fn a_hostile_driver_gets_no_further_than_its_own_ring() {
    survives("rings", 3000);
}

#[test]
fn a_front_end_may_send_anything_and_leaves_nothing_behind() {
    survives("messages", 800);
}

#[test]
fn every_line_of_an_operator_has_its_answer() {
    survives("control", 400);
}

#[test]
fn every_boot_line_is_understood_or_refused() {
    survives("bootline", 1500);
}

#[test]
fn every_target_is_run_here() {
    let tests = include_str!("bounded.rs");
    for target in TARGETS {
        assert!(tests.contains(&format!("survives(\"{}\"", target.name)), "{} is not", target.name);
    }
}
