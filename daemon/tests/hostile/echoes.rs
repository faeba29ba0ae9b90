//! The echo of honest VMs beside an attack, and, by turns, that of a host whom nobody attacks. Each
//! is judged by the time that its daemon's worker has had on a core until it was there: what others
//! on the machine do makes an echo late, and is none of the daemon's. So the bounds are those of
//! `times.rs`, without a wait for the core. `costly.rs` judges the same
//! attack by all the work that it makes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nightporter_core::wire::virtio_net::VirtioNetHdr;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::dup;

use crate::costly::worked;
use crate::guest::{Guest, PLAIN};
use crate::street::Street;
use crate::times::{Echoes, Times, at_fixed_times};

/// For each host.
const ECHOES: u64 = 800;
/// A port that has taken nothing for so long is gone.
const GONE: Duration = Duration::from_millis(100);
/// VMs that mean harm, one after the other: each loses its port for a minute.
const VILLAINS: usize = 3;

/// How far an attack is: it says that it has begun, and is told that it is over.
#[derive(Default)]
struct Course {
    has_begun: AtomicBool,
    is_over: AtomicBool,
}

impl Course {
    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    fn begins(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }
}

/// It is over whatever becomes of the judgement.
struct Ends<'a>(&'a Course);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Judges echoes on a street with VMs that mean harm, who have this in their sections, while
/// `attack` has their sockets. The street, when that is over.
fn judged_beside(section: &str, attack: impl FnOnce(&[PathBuf], &Course) + Send) -> Street {
    let names: Vec<_> = (0..VILLAINS).map(|n| format!("bad{n}")).collect();
    let vms: Vec<_> = names.iter().map(|name| (name.as_str(), section)).collect();
    let (mut street, mut twin) = (Street::of(&vms), Street::of(&vms));
    let sockets: Vec<_> = names.iter().map(|name| street.dir.join(name)).collect();
    let course = Course::default();
    thread::scope(|scope| {
        let attacks = scope.spawn(|| attack(&sockets, &course));
        let _ends = Ends(&course);
        while !course.has_begun.load(Ordering::Relaxed) && !attacks.is_finished() {
            pause(1);
        }
        let mut echoes = Echoes::default();
        let (mut pace, Echoes { alone, beside, woken }) = (Times::default(), &mut echoes);
        at_fixed_times(ECHOES, &mut pace, woken, || {
            beside.add(worked_for_echo(&mut street));
            alone.add(worked_for_echo(&mut twin));
        });
        let verdict = echoes.judge_all(false);
        verdict.unwrap_or_else(|why| panic!("{why}\n{}", echoes.shown()));
    });
    street
}

fn worked_for_echo(street: &mut Street) -> Duration {
    let before = worked(&street.host);
    street.echo();
    worked(&street.host) - before
}

/// How many of them were banned.
fn banned(street: &Street) -> u64 {
    let ports = street.host.status().ports;
    ports.iter().filter_map(|port| port.vm.as_ref()).map(|vm| vm.blocked).sum()
}

/// Waits for a while.
fn pause(steps: u64) {
    let (mut times, mut woken) = (Times::default(), Times::default());
    at_fixed_times(steps, &mut times, &mut woken, || {});
}

/// A frame for all, with this in it.
fn to_all(len: usize) -> (VirtioNetHdr, Vec<u8>) {
    let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, 9]].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.resize(len, 7);
    (VirtioNetHdr::default(), frame)
}

#[test]
fn signals_for_which_very_many_wait_delay_no_echo() {
    let street = judged_beside("ack_offload = false", |sockets, course| {
        let (speaker, hearers) = sockets.split_first().unwrap();
        let mut speaker = Guest::boot(speaker, PLAIN);
        for hearer in hearers {
            let mut bad = Guest::boot(hearer, PLAIN);
            let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            bad.is_signalled_by(0, &call);
            let names: Vec<_> = (0..500).map(|_| dup(&call).unwrap()).collect();
            let _crowd: Vec<_> = (0..100)
                .map(|_| {
                    let some = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
                    for name in &names {
                        let data = epoll::EventData::new_u64(0);
                        epoll::add(&some, name, data, epoll::EventFlags::IN).unwrap();
                    }
                    some
                })
                .collect();
            let mut heard_at = Instant::now();
            course.begins();
            while course.goes_on() && heard_at.elapsed() < GONE {
                bad.offer(1);
                speaker.send(&[to_all(60)]);
                pause(2);
                if !bad.received().is_empty() {
                    heard_at = Instant::now();
                }
            }
        }
    });
    assert!(banned(&street) > 0, "it has tried");
}
