//! Two taps in a bridge: the VM's, whose frames are turned, and one that is the network.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nightporter_attach::area::{Area, View};
use nightporter_attach::tap::Tap;
use nightporter_attach::{AttachError, Attached, Held, Hooks, Request, Way, attach};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};

/// A test that waits longer for anything has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// The slot of the VM's tap: not the first.
pub(crate) const SLOT: usize = 3;
/// Longer than any frame.
const BUFFER: usize = 1 << 17;

/// A reader of a tap that takes everything: CSUM, TSO4, TSO6, ECN, USO4, USO6 (linux/if_tun.h).
pub(crate) const ALL: u64 = 0x6f;
/// One of QEMU before 8.1: no USO.
pub(crate) const NO_USO: u64 = 0x0f;
/// Firmware.
pub(crate) const NOTHING: u64 = 0;

/// The sides of the VM's tap.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Side {
    Vm,
    Network,
}

pub(crate) const SIDES: [Side; 2] = [Side::Vm, Side::Network];
pub(crate) const WAYS: [Way; 2] = [Way::Tcx, Way::Clsact];

impl Side {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Vm => Self::Network,
            Self::Network => Self::Vm,
        }
    }
}

/// See the module doc.
pub(crate) struct World {
    vm: Tap,
    network: Tap,
    pub(crate) area: Area,
    pub(crate) view: View,
    pub(crate) daemon: Option<Daemon>,
    /// Taps of one that has detached, `from_vm` and `to_net`: the kernel may still have frames of
    /// them, and a program that was about to turn one when it was taken away does so.
    left: Option<(OwnedFd, OwnedFd)>,
}

/// A daemon's part of an attached tap.
pub(crate) struct Daemon {
    pub(crate) held: Held,
    _claim: OwnedFd,
    from_vm: OwnedFd,
    to_net: OwnedFd,
}

pub(crate) fn ip(arguments: &str) {
    run("ip", arguments);
}

pub(crate) fn run(program: &str, arguments: &str) {
    let status = Command::new(program).args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "{program} {arguments}");
}

impl World {
    /// Runs a test in a world of its own, whose readers have these features. One at a time: a
    /// program that another one starts holds copies of all links for a moment.
    pub(crate) fn run(offloads: u64, limit: Duration, test: impl FnOnce(Self) + Send + 'static) {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        // The namespace is this thread's, and of the processes that it starts.
        let thread = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            test(Self::new(offloads, limit));
        });
        thread.join().unwrap();
    }

    fn new(offloads: u64, limit: Duration) -> Self {
        // The kernel reports the groups of routers wherever it has IPv6: in our taps, too.
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        ip("link add br0 mtu 9200 type bridge stp_state 0 mcast_snooping 0 group_fwd_mask 16384");
        is_silent("br0");
        ip("link set br0 up");
        let network = member("net0", ALL);
        let vm = member("vm0", offloads);
        let area = Area::new(limit).unwrap();
        let view = area.view().unwrap();
        Self { vm, network, area, view, daemon: None, left: None }
    }

    /// The VM's tap comes anew, by the same name, as a VMM that ended does it.
    pub(crate) fn restart_vmm(&mut self, offloads: u64) {
        drop(std::mem::replace(&mut self.vm, member("vm1", offloads)));
        self.vm = member("vm0", offloads);
    }

    pub(crate) fn index(&self) -> u32 {
        self.vm.index()
    }

    /// # Errors
    /// As of `attach`.
    pub(crate) fn attach(&mut self, way: Way) -> Result<(), AttachError> {
        let request = Request { index: self.index(), slot: SLOT, mark: 0x7b5c_91e3 };
        let attached = attach(&Hooks::by(way)?, &self.area, &request)?;
        let Attached { from_vm, to_net, held, claim } = attached;
        let (from_vm, to_net) = (from_vm.into_fd(), to_net.into_fd());
        self.daemon = Some(Daemon { held, from_vm, to_net, _claim: claim });
        Ok(())
    }

    /// The daemon gives back what was turned, then the programs go.
    pub(crate) fn detach(&mut self) {
        self.work();
        let daemon = self.daemon.take().unwrap();
        match daemon.held {
            Held::Links(links) => drop(links),
            Held::Filters(filters) => filters.remove().unwrap(),
        }
        self.left = Some((daemon.from_vm, daemon.to_net));
        self.work();
    }

    fn tap(&self, side: Side) -> &File {
        match side {
            Side::Vm => self.vm.file(),
            Side::Network => self.network.file(),
        }
    }

    /// Header and frame. The kernel may refuse it, as it would without us.
    pub(crate) fn send(&self, from: Side, bytes: &[u8]) -> bool {
        self.tap(from).write(bytes).is_ok()
    }

    /// Waits for the next frame at this side, header and frame, while the daemon works if `works`.
    /// `None`: none came.
    pub(crate) fn receive(&self, at: Side, patience: Duration, works: bool) -> Option<Vec<u8>> {
        let deadline = Instant::now() + patience;
        let mut buffer = vec![0; BUFFER];
        loop {
            if works {
                self.work();
            }
            match self.tap(at).read(&mut buffer) {
                Ok(len) => {
                    buffer.truncate(len);
                    return Some(buffer);
                }
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock, "{e}"),
            }
            let now = Instant::now();
            if now >= deadline {
                return None;
            }
            let mut ready = vec![PollFd::new(self.tap(at).as_fd(), PollFlags::POLLIN)];
            if works {
                let taps = self.taps().flat_map(|(from_vm, to_net)| [from_vm, to_net]);
                ready.extend(taps.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
            }
            poll(&mut ready, PollTimeout::try_from(deadline - now).unwrap()).unwrap();
        }
    }

    /// The daemon's taps.
    fn taps(&self) -> impl Iterator<Item = (&OwnedFd, &OwnedFd)> {
        let now = self.daemon.as_ref().map(|daemon| (&daemon.from_vm, &daemon.to_net));
        now.into_iter().chain(self.left.as_ref().map(|(from_vm, to_net)| (from_vm, to_net)))
    }

    /// A turn of the daemon, as its worker does it: it notes that it is awake, gives back what lies
    /// in its taps, and notes that it has left nothing. How many frames those were.
    pub(crate) fn work(&self) -> u64 {
        self.view.wake();
        let given =
            self.taps().map(|(from_vm, to_net)| pump(from_vm, to_net) + pump(to_net, from_vm));
        let given = given.sum();
        self.view.wake();
        given
    }
}

/// A tap in the bridge.
fn member(name: &str, offloads: u64) -> Tap {
    let tap = Tap::of_vmm(name, offloads).unwrap();
    is_silent(name);
    ip(&format!("link set {name} mtu 9200 master br0 up"));
    tap
}

/// The host sends nothing of its own out of this interface.
fn is_silent(name: &str) {
    std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1").unwrap();
}

fn pump(from: &OwnedFd, to: &OwnedFd) -> u64 {
    let (mut buffer, mut frames) = (vec![0; BUFFER], 0);
    while let Ok(len) = nix::unistd::read(from, &mut buffer) {
        assert!(len < BUFFER);
        nix::unistd::write(to, &buffer[..len]).unwrap();
        frames += 1;
    }
    frames
}
