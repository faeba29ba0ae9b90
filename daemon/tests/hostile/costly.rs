//! Deeds that cost the kernel something, and through it whoever calls it. They are judged by the
//! time that the worker has on its core, which the load of others does not change.

use std::time::{Duration, Instant};

use nightporterd::vhost::features::bit;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::dup;

use crate::asleep::sealed_memory;
use crate::guest::{Guest, PLAIN, RAM_LEN};
use crate::host::{Host, LIMIT};
use crate::street::Street;
use crate::times::{Times, at_fixed_times, judge_beside};

/// The time that the worker has had on a core so far.
pub(crate) fn worked(host: &Host) -> Duration {
    let pid = host.pid();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/schedstat")).unwrap();
    let ns = stat.split(' ').next().unwrap().parse().unwrap();
    Duration::from_nanos(ns)
}

/// So much of it goes into 300 ms in which nobody wants anything.
fn worked_for_nothing(street: &Street) -> Duration {
    let before = worked(&street.host);
    let (mut times, mut woken) = (Times::default(), Times::default());
    at_fixed_times(300, &mut times, &mut woken, || {});
    worked(&street.host) - before
}

#[test]
fn a_kick_that_is_there_for_ever_does_not_keep_the_worker_busy() {
    let mut street = Street::new("ack_offload = false");
    let bad = Guest::boot(&street.dir.join("bad"), PLAIN);
    street.host.until("bad", |port| port.link);
    let alone = worked_for_nothing(&street);
    let kick = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE).unwrap();
    rustix::io::write(&kick, &(1_u64 << 62).to_ne_bytes()).unwrap();
    bad.is_kicked_by(1, &kick);
    let beside = worked_for_nothing(&street);
    // Without the ban all of the 300 ms; on a busy machine a wake-up takes longer, too.
    assert!(beside < alone + Duration::from_millis(100), "{beside:?}, and alone {alone:?}");
    let none = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let kicks = |on| bad.is_kicked_by(1, if on { &kick } else { &none });
    judge_beside(false, kicks, || _ = street.echo());
}

#[test]
fn a_signal_for_which_very_many_wait_holds_up_nobody_and_is_banned() {
    let mut street = Street::new("ack_offload = false");
    let mut bad = Guest::boot(&street.dir.join("bad"), PLAIN);
    let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    bad.is_signalled_by(0, &call);
    // A million take a third of a second to call; the fewer, the sooner this test is over.
    let names: Vec<_> = (0..1000).map(|_| dup(&call).unwrap()).collect();
    let crowd: Vec<_> = (0..200)
        .map(|_| {
            let some = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            for name in &names {
                let data = epoll::EventData::new_u64(0);
                epoll::add(&some, name, data, epoll::EventFlags::IN).unwrap();
            }
            some
        })
        .collect();
    let start = Instant::now();
    rustix::io::write(&call, &1_u64.to_ne_bytes()).unwrap();
    let one_call = start.elapsed();
    let (start, mut most) = (Instant::now(), Duration::ZERO);
    while street.host.port("bad").vm.unwrap().blocked == 0 {
        assert!(start.elapsed() < 3 * LIMIT, "it goes on: {one_call:?} a call");
        bad.offer(1);
        let before = worked(&street.host);
        street.goes_on(); // a broadcast, of which it wants to be told
        most = most.max(worked(&street.host) - before);
    }
    assert!(most < one_call.min(Duration::from_millis(20)), "{most:?}, and {one_call:?} a call");
    drop(crowd);
    street.goes_on();
}

/// Frames in a thousand pieces, each in the next page of its memory: the median of what an echo
/// beside that takes of the worker. `None`: its port went.
fn worked_for_echoes_beside(street: &mut Street, bad: &mut Guest, len: u64) -> Option<Duration> {
    const PIECES: u64 = 1000;
    let (mut at, mut waiting, mut times) = (RAM_LEN, 0_usize, Vec::new());
    while at + PIECES * 4096 < len {
        while waiting < 32 && at + PIECES * 4096 < len {
            bad.sends_scattered(at, 4096, PIECES);
            at += PIECES * 4096;
            waiting += 1;
        }
        let before = worked(&street.host);
        street.echo();
        times.push(worked(&street.host) - before);
        waiting = waiting.saturating_sub(bad.taken()); // some may be of an earlier call
        if !street.host.port("bad").link {
            return None;
        }
    }
    times.sort_unstable();
    Some(times[times.len() / 2])
}

#[test]
fn who_sends_frames_in_hundreds_of_pages_that_nobody_has_touched_delays_nobody_for_long() {
    const LEN: u64 = 1 << 30;
    let mut street = Street::new("ack_offload = false");
    let ram = sealed_memory("untouched", LEN);
    let mut bad = Guest::boot_in(&street.dir.join("bad"), PLAIN | bit::INDIRECT_DESC, ram);
    bad.has_memory(LEN);
    street.host.until("bad", |port| port.link);
    match worked_for_echoes_beside(&mut street, &mut bad, LEN) {
        None => assert_eq!(street.host.port("bad").vm.unwrap().blocked, 1, "it is banned"),
        // A kernel that clears them in less time than these frames take anyway.
        Some(first) => {
            let again = worked_for_echoes_beside(&mut street, &mut bad, LEN).unwrap();
            assert!(first < 2 * again, "{first:?}, and {again:?} when the pages were there");
        }
    }
    street.goes_on();
}
