//! Sockets of guests of a daemon that is in the test's own thread and time: its turns are counted,
//! and nobody waits for a clock.

use std::cell::RefCell;
use std::rc::Rc;

use nightporter_core::limits::{TOE_SOCKETS_MAX, TOE_SOCKETS_PER_STEP};
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nightporter_core::toe::control;
use nightporter_core::toe::vsock::Ports;
use nightporterd::port::vhost_user::{VhostUserConfig, VhostUserPort};
use nightporterd::sockets::{GUEST_CID, Member, Toe};
use nightporterd::vhost::listener::Access;
use nightporterd::vhost::vsock::Vsock;
use nightporterd::vhost::{Event, Source};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::guest::is_served_by;
use crate::host::Dir;
use crate::sockets::{SocketGuest, connect, listen, try_connect, until};
use crate::toe::{NATIVE, socket};

/// The daemon's part, with the VMs a, b, c at ports 0, 1, 2.
pub(crate) struct Daemon {
    pub(crate) toe: Toe,
    pub(crate) now: Instant,
    vms: u16,
    /// Sockets of each VM after each turn.
    sockets: Vec<Vec<u64>>,
}

impl Daemon {
    /// The worker's step between two turns, and a turn.
    pub(crate) fn serve(&mut self) {
        for port in (0..self.vms).map(PortId) {
            let device = self.toe.port_mut(port).expect("each VM has the device");
            device.handle_listener();
            device.handle_connection();
            let kicked: Vec<u16> = (0..2).filter(|vring| has_kicked(device, *vring)).collect();
            for vring in &kicked {
                device.handle_kick(*vring);
            }
            if !kicked.is_empty() {
                self.toe.wake(port);
            }
            while let Some(event) = self.toe.port_mut(port).and_then(|it| it.poll_event()) {
                match event {
                    Event::Link(None) => self.toe.lose(self.now, port),
                    Event::Link(Some(_)) | Event::RingBroken { .. } => {
                        self.toe.look_at_link(self.now, port);
                    }
                    Event::RingStarted(_) => self.toe.wake(port),
                    _ => {}
                }
            }
        }
        let _ = self.toe.turn(self.now);
        self.sockets.push((0..self.vms).map(|vm| self.sockets(vm)).collect());
    }

    pub(crate) fn sockets(&self, vm: u16) -> u64 {
        self.toe.status(PortId(vm)).expect("it has the device").sockets
    }
}

fn has_kicked(device: &VhostUserPort<Vsock>, vring: u16) -> bool {
    let Some(fd) = device.fd(Source::Kick(vring)) else { return false };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

/// The configuration of the VM at this port, whose address is its number and one.
pub(crate) fn member(vm: u16, isolated: bool) -> Member {
    let ips = vec![format!("10.0.0.{}", vm + 1).parse().unwrap()];
    Member { ips, network: (String::new(), None), isolated, to_itself: false }
}

/// A daemon in this thread, with so many VMs whose guests have booted.
pub(crate) fn start(vms: u16) -> (Dir, Rc<RefCell<Daemon>>, Vec<SocketGuest>) {
    let dir = Dir::new();
    let mut toe = Toe::new(7);
    let names: Vec<&str> = ["a", "b", "c"].into_iter().take(vms.into()).collect();
    for (port, name) in (0..).zip(&names) {
        let config = VhostUserConfig {
            name: (*name).into(),
            socket: socket(&dir, name),
            access: Access::default(),
            mac: None,
            mtu: None,
            queue_pairs: 1,
            allow_unsealed_memory: false,
            memory_max: None,
            memory_is_limited: false,
        };
        let mut device = VhostUserPort::with(&config, Vsock { cid: GUEST_CID });
        device.listen().unwrap();
        toe.add(PortId(port), device, member(port, false));
    }
    let daemon = Rc::new(RefCell::new(Daemon {
        toe,
        now: Instant::from_secs(1000),
        vms,
        sockets: Vec::new(),
    }));
    let served = daemon.clone();
    is_served_by(Rc::new(move || served.borrow_mut().serve()));
    let guests = names.iter().map(|name| SocketGuest::boot(&socket(&dir, name))).collect();
    (dir, daemon, guests)
}

/// All that happens until then, in the time that the daemon's timers say; how many turns it took.
pub(crate) fn run(
    daemon: &RefCell<Daemon>,
    guests: &mut [SocketGuest],
    end: Instant,
    mut sees: impl FnMut(&Daemon, &[SocketGuest]),
) -> usize {
    let (mut turns, mut idle) = (0, 0);
    loop {
        let moved = guests.iter_mut().fold(false, |any, guest| guest.step() | any);
        let mut daemon = daemon.borrow_mut();
        daemon.serve();
        sees(&daemon, guests);
        turns += 1;
        idle = if moved || daemon.toe.has_work() { 0 } else { idle + 1 };
        if idle < 2 {
            continue;
        }
        let next = daemon.toe.poll_timeout().filter(|next| *next <= end);
        match next {
            None if daemon.now == end => return turns,
            _ => daemon.now = next.unwrap_or(end).max(daemon.now),
        }
        idle = 0;
    }
}

#[test]
fn a_vm_whose_rules_change_has_so_many_sockets_reset_in_a_turn_and_no_more() {
    let (_dir, daemon, mut guests) = start(2);
    let [a, b] = &mut guests[..] else { unreachable!("two") };
    listen(b, "10.0.0.2:80");
    let all: Vec<Ports> = (0..700).map(|_| try_connect(a, "10.0.0.2:80").unwrap()).collect();
    until(&mut [a, b], "all are open", |g| all.iter().all(|p| g[0].socket(*p).is_open));
    // Its later packets are handled when all of these have ended.
    let ports = Ports { guest: 900, host: control::PORT };
    b.begin(ports);
    let change = |isolated| {
        let daemon = &mut *daemon.borrow_mut();
        daemon.sockets = vec![vec![daemon.sockets(0), daemon.sockets(1)]];
        daemon.toe.set(daemon.now, PortId(1), member(1, isolated));
        daemon.sockets.push(vec![daemon.sockets(0), daemon.sockets(1)]);
    };
    change(true);
    assert_eq!(try_connect(a, "10.0.0.2:80"), Err(NATIVE), "it is isolated already");
    until(&mut [a, b], "both hear of it", |g| {
        let own = g[1].sockets.iter().filter(|(at, _)| at.host != control::PORT);
        g[1].socket(ports).is_open
            && own.clone().count() == 700
            && own.clone().all(|(_, it)| it.is_reset)
            && all.iter().all(|p| g[0].socket(*p).is_reset)
    });
    let left: Vec<u64> = daemon.borrow().sockets.iter().map(|all| all[1]).collect();
    let steps: Vec<u64> = left.windows(2).map(|two| two[0] - two[1]).filter(|n| *n > 0).collect();
    let most = TOE_SOCKETS_PER_STEP as u64;
    assert_eq!(steps, [most, most, 700 - 2 * most]);
    change(false);
    listen(b, "10.0.0.2:80");
    let (at_a, at_b) = connect(a, b, "10.0.0.2:80");
    a.write(at_a, b"again");
    until(&mut [a, b], "bytes", |g| g[1].socket(at_b).got == b"again");
}

#[test]
fn vtoe_10_a_vm_with_two_addresses_takes_no_more_places_of_another_than_with_one() {
    let (_dir, daemon, mut guests) = start(2);
    let both = ["10.0.0.1", "10.0.1.1"].map(|ip| ip.parse().unwrap());
    {
        let daemon = &mut *daemon.borrow_mut();
        let two = Member { ips: both.into(), ..member(0, false) };
        daemon.toe.set(daemon.now, PortId(0), two);
    }
    let [a, b] = &mut guests[..] else { unreachable!("two") };
    listen(b, "10.0.0.2:80");
    let mut all = Vec::new();
    for n in 0..TOE_SOCKETS_MAX / 2 + 100 {
        a.from = both[n % 2];
        // Those who come when one was refused are not asked for.
        all.extend(try_connect(a, "10.0.0.2:80").ok());
    }
    until(&mut [a, b], "all are answered", |g| {
        all.iter().all(|at| g[0].socket(*at).is_open || g[0].socket(*at).is_reset)
    });
    let open = all.iter().filter(|at| a.socket(**at).is_open).count();
    assert_eq!(open, TOE_SOCKETS_MAX / 2);
}
