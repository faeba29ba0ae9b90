//! The VM's end of an attached tap as a port: frames that the VM has sent are read from one of the
//! daemon's taps, and frames for it are written there (`nightporter_attach`).
//!
//! The kernel takes every frame for the VM and drops it silently when the tap's queue is full. But
//! the counters of the VM's tap move when its VMM reads a frame, not when it is sent. So the port
//! knows what is queued, and has a window: the rest waits in the daemon, as for a full ring.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nightporter_api::AttachedStatus;
use nightporter_attach::area::{Plain, SLOTS, View};
use nightporter_attach::tap;
use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::tap::TapPort;
use crate::config::{UplinkConfig, UplinkKind, VmConfig};

/// Frames and bytes that may lie in the tap's queue: a millisecond at 10 Gbit/s, after which the
/// worker looks again.
const WINDOW_FRAMES: usize = 64;
/// See [`WINDOW_FRAMES`].
const WINDOW_BYTES: usize = 2 << 20;
/// A queue that has not moved for so long is taken for empty: no counter tells of frames that
/// something before it has dropped, as a qdisc that limits the rate. Longer than guests are off
/// their cores as a rule.
const STILL_MAX: Duration = Duration::from_millis(500);
/// Between two such times, unless it has moved in between. So a VM that stands has its queue full
/// after a minute, and loses frames as by a tap alone.
const FORGET: Duration = Duration::from_secs(4);
/// The first of the links are those of the daemon's taps; the others are of the VM's.
const LINKS_OF_OWN_TAPS: usize = 4;
/// Of the kernel, with their counters.
const INTERFACES: &str = "/sys/devices/virtual/net";
/// More than a counter's digits.
const DIGITS_MAX: usize = 24;

/// A slot of the area, until it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    number: u8,
    taken: Slots,
}

/// The slots of the area that are taken, and for each the number of the tap that is attached, or 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots(Arc<Mutex<BTreeMap<u8, u32>>>);

impl Slots {
    /// One that is free. `None`: no more taps can be attached.
    pub(crate) fn take(&self) -> Option<Slot> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = (0..=u8::MAX).take(SLOTS).find(|slot| !taken.contains_key(slot))?;
        taken.insert(number, 0);
        Some(Slot { number, taken: self.clone() })
    }
}

impl Slot {
    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    /// Is for the tap with this number. `false`: another one is. The programs of two would take
    /// each other's frames for the VM's, and turn them for ever.
    #[must_use]
    pub(crate) fn claim(&self, tap: u32) -> bool {
        let mut taken = self.taken.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = taken.iter().all(|(slot, other)| *other != tap || *slot == self.number);
        if is_free {
            taken.insert(self.number, tap);
        }
        is_free
    }

    /// The tap is plain.
    fn release(&self) {
        self.taken.0.lock().unwrap_or_else(PoisonError::into_inner).insert(self.number, 0);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.taken.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

/// See the module doc.
#[derive(Debug)]
pub struct AttachedPort {
    /// The programs are there as long as these are: dropped first, for frames are lost that are
    /// turned to taps that have gone.
    /// There are none on kernels without them.
    links: Vec<OwnedFd>,
    /// No other daemon attaches the tap until then.
    claim: Option<OwnedFd>,
    from_vm: TapPort,
    /// The other end of the wire, until the worker has a port for it.
    to_net: Option<TapPort>,
    vm: VmConfig,
    /// The name of the VM's tap, and its number.
    tap: String,
    index: u32,
    view: View,
    slot: Slot,
    /// The counts of the slot when it was attached.
    plain_before: Plain,
    /// The names of the daemon's taps: of the VM's frames, of the network's.
    own_taps: [String; 2],
    window: Window,
    /// The VM has sent something since it was last looked at.
    has_sent: bool,
    /// Frames wait for room.
    waits: bool,
}

/// The parts of an attached tap.
pub(crate) struct Parts {
    pub(crate) index: u32,
    pub(crate) from_vm: OwnedFd,
    pub(crate) to_net: OwnedFd,
    pub(crate) claim: OwnedFd,
    pub(crate) links: Vec<OwnedFd>,
    pub(crate) view: View,
    pub(crate) slot: Slot,
}

impl AttachedPort {
    /// For the VM with this configuration, whose tap is called `tap`.
    pub(crate) fn new(vm: &VmConfig, tap: &str, parts: Parts) -> Self {
        let Parts { index, from_vm, to_net, claim, links, view, slot } = parts;
        let own_taps = [&from_vm, &to_net].map(|fd| tap::name_of(fd.as_fd()).unwrap_or_default());
        let plain_before = view.plain(slot.number().into());
        view.set_plain(slot.number().into(), false); // whoever had it before
        let end = |fd: OwnedFd, name: String| {
            let config = UplinkConfig {
                name,
                network: None,
                kind: UplinkKind::Tap,
                ifname: tap.to_owned(),
                create: false,
                bridge: None,
            };
            TapPort::of(File::from(fd), index, &config)
        };
        Self {
            from_vm: end(from_vm, vm.name.clone()),
            to_net: Some(end(to_net, net_name(&vm.name))),
            links,
            claim: Some(claim),
            vm: vm.clone(),
            tap: tap.to_owned(),
            index,
            view,
            slot,
            plain_before,
            own_taps,
            window: Window::new(tap, index),
            has_sent: false,
            waits: false,
        }
    }

    /// The VM's configuration when it was attached.
    pub(crate) fn vm(&self) -> &VmConfig {
        &self.vm
    }

    /// The name of the VM's tap.
    pub(crate) fn tap(&self) -> &str {
        &self.tap
    }

    /// The number of the VM's tap.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// The descriptor to wait on.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.from_vm.fd()
    }

    /// The other end of the wire, for a port of its own.
    pub(crate) fn take_end(&mut self) -> Option<TapPort> {
        self.to_net.take()
    }

    /// The area that programs and worker share.
    pub(crate) fn view(&self) -> View {
        self.view
    }

    /// Frames that have passed plain, since the programs of any tap first had this slot.
    pub(crate) fn plain(&self) -> Plain {
        self.view.plain(self.slot.number().into())
    }

    /// From now on all frames pass plain, or they are turned again.
    pub(crate) fn set_plain(&self, all: bool) {
        self.view.set_plain(self.slot.number().into(), all);
    }

    /// For operators, as far as it is known here.
    pub(crate) fn status(&self) -> AttachedStatus {
        let Plain { from_vm, from_net, .. } = self.plain().since(&self.plain_before);
        // The kernel drops what finds the queue of a tap full, and counts it as not sent.
        let lost = |tap: &String| {
            let path = format!("{INTERFACES}/{tap}/statistics/tx_dropped");
            fs::read_to_string(path).ok().and_then(|count| count.trim().parse().ok())
        };
        let [lost_from_vm, lost_to_vm] = self.own_taps.each_ref().map(|it| lost(it).unwrap_or(0));
        AttachedStatus {
            plain_from_vm: from_vm,
            plain_to_vm: from_net,
            lost_from_vm,
            lost_to_vm,
            queue_frames: self.window.queued.len() as u64,
            queue_bytes: self.window.bytes as u64,
            window_frames: WINDOW_FRAMES as u64,
            window_bytes: WINDOW_BYTES as u64,
            ..AttachedStatus::default()
        }
    }

    /// The VM's tap is plain from now on; the port goes on giving back.
    pub(crate) fn unlink(&mut self) {
        if self.links.is_empty() {
            self.set_plain(true); // until the broker takes the filters away
        }
        self.links.truncate(LINKS_OF_OWN_TAPS);
        self.claim = None;
        self.slot.release();
    }

    /// Whether it is to be looked at again soon: no event says that the VM has made room.
    pub(crate) fn is_polled(&self) -> bool {
        self.waits
    }

    /// Drops the frames of the VM that wait to be read, `most` at most. How many those were.
    pub(crate) fn discard(&mut self, most: usize) -> usize {
        self.from_vm.discard(most)
    }

    pub(super) fn receive(&mut self, buf: &mut [u8]) -> Received {
        let received = self.from_vm.receive(buf);
        self.has_sent |= matches!(received, Received::Frame(..));
        received
    }

    pub(super) fn send(&mut self, hdr: &VirtioNetHdr, parts: &[&[u8]]) -> Sent {
        let len = parts.iter().map(|part| part.len()).sum();
        if !self.window.has_room() {
            return Sent::Full;
        }
        let sent = self.from_vm.send(hdr, parts);
        if sent == Sent::Done {
            self.window.note_sent(len);
        }
        sent
    }

    /// Bytes of the longest frame up to `want` that there is room for.
    pub(crate) fn room(&mut self, want: usize) -> usize {
        if self.window.has_room() { want } else { 0 }
    }

    /// Whether the VM has shown life since the last call. `Some(true)`: and has taken all.
    pub(crate) fn progress(&mut self) -> Option<bool> {
        self.window.look(Instant::now());
        let alive = std::mem::take(&mut self.has_sent) | std::mem::take(&mut self.window.has_moved);
        alive.then_some(self.window.queued.is_empty())
    }

    pub(crate) fn wait_for_room(&mut self, waits: bool) {
        self.waits = waits;
    }
}

/// Behind the VM's name in that of the port at the network's end, which no VM can have.
pub(crate) const NET: &str = "/net";

/// The name of the port at the network's end.
pub(crate) fn net_name(vm: &str) -> String {
    format!("{vm}{NET}")
}

/// The frames in the queue of the VM's tap.
#[derive(Debug)]
struct Window {
    /// Frames that the VMM has read, and those that were dropped. `None`: they cannot be read.
    counters: Option<[File; 2]>,
    /// At the last look.
    counts: [u64; 2],
    /// Lengths of the frames that are queued.
    queued: VecDeque<usize>,
    bytes: usize,
    /// Since when no frame has come or gone.
    still_since: Instant,
    /// From then on it may be taken for empty.
    may_forget_at: Instant,
    has_moved: bool,
}

impl Window {
    fn new(tap: &str, index: u32) -> Self {
        let dir = format!("{INTERFACES}/{tap}");
        let open = |name| File::open(format!("{dir}/statistics/{name}"));
        // The directory may be another network namespace's.
        let is_its = || fs::read_to_string(format!("{dir}/ifindex"));
        let is_its = is_its().is_ok_and(|number| number.trim() == index.to_string());
        let counters = match (is_its, open("tx_packets"), open("tx_dropped")) {
            (true, Ok(packets), Ok(dropped)) => Some([packets, dropped]),
            (is_its, packets, dropped) => {
                let error = packets.and(dropped).err();
                tracing::warn!(%tap, is_its, ?error, "no counters of the tap: it has no window");
                None
            }
        };
        Self::with(counters, Instant::now())
    }

    fn with(counters: Option<[File; 2]>, now: Instant) -> Self {
        let mut window = Self {
            counters,
            counts: [0; 2],
            queued: VecDeque::new(),
            bytes: 0,
            still_since: now,
            may_forget_at: now,
            has_moved: false,
        };
        window.counts = window.read().unwrap_or_default();
        window
    }

    fn read(&self) -> Option<[u64; 2]> {
        let mut counts = [0; 2];
        for (counter, count) in self.counters.as_ref()?.iter().zip(&mut counts) {
            let mut digits = [0; DIGITS_MAX];
            let len = counter.read_at(&mut digits, 0).ok()?;
            *count = std::str::from_utf8(&digits[..len]).ok()?.trim().parse().ok()?;
        }
        Some(counts)
    }

    /// Frames that have left the queue since the last look are gone. There may be more of those
    /// than we have sent: frames passed plain, or were cut for a reader without offloads.
    fn look(&mut self, now: Instant) {
        let Some(counts) = self.read() else {
            return self.forget(); // nothing is known, or the tap has gone
        };
        let [read, dropped] = [0, 1].map(|i| counts[i].wrapping_sub(self.counts[i]));
        self.counts = counts;
        self.has_moved |= read > 0;
        let gone = usize::try_from(read.saturating_add(dropped)).unwrap_or(usize::MAX);
        if gone > 0 {
            (self.still_since, self.may_forget_at) = (now, now);
        }
        let gone = gone.min(self.queued.len());
        self.bytes -= self.queued.drain(..gone).sum::<usize>();
        let is_still = now.duration_since(self.still_since) >= STILL_MAX;
        if is_still && now >= self.may_forget_at && !self.queued.is_empty() {
            self.may_forget_at = now + FORGET;
            self.forget();
        }
    }

    fn forget(&mut self) {
        self.queued.clear();
        self.bytes = 0;
    }

    fn is_open(&self) -> bool {
        self.queued.len() < WINDOW_FRAMES && self.bytes < WINDOW_BYTES
    }

    fn has_room(&mut self) -> bool {
        if !self.is_open() {
            self.look(Instant::now());
        }
        self.is_open()
    }

    fn note_sent(&mut self, len: usize) {
        if self.counters.is_some() {
            self.queued.push_back(len);
            self.bytes += len;
            self.still_since = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_free_again_when_its_port_goes() {
        let slots = Slots::default();
        let all: Vec<_> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(all.len(), SLOTS);
        drop(all);
        assert_eq!(slots.take().unwrap().number(), 0);
    }

    #[test]
    fn a_tap_is_that_of_one_slot_until_it_is_plain() {
        let slots = Slots::default();
        let [one, other] = [slots.take().unwrap(), slots.take().unwrap()];
        assert!(one.claim(7) && one.claim(7) && !other.claim(7) && other.claim(8));
        one.release();
        assert!(other.claim(7) && !one.claim(7));
        drop(other);
        assert!(one.claim(7));
    }

    #[test]
    fn frames_wait_when_the_vmm_reads_none_and_go_on_when_it_does() {
        let dir = std::env::temp_dir().join(format!("np-window-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let paths = ["packets", "dropped"].map(|name| dir.join(name));
        let write = |counts: [u32; 2]| {
            let both = paths.iter().zip(counts);
            both.for_each(|(path, count)| std::fs::write(path, format!("{count}\n")).unwrap());
        };
        write([5, 7]);
        let counters = paths.each_ref().map(|path| File::open(path).unwrap());
        let mut window = Window::with(Some(counters), Instant::now());
        for _ in 0..WINDOW_FRAMES {
            assert!(window.has_room());
            window.note_sent(100);
        }
        assert!(!window.has_room() && !window.has_moved);
        write([5, 8]);
        assert!(window.has_room() && !window.has_moved, "a frame was dropped, and none read");
        write([14, 8]);
        window.look(Instant::now());
        assert!(window.has_moved);
        assert_eq!((window.queued.len(), window.bytes), (WINDOW_FRAMES - 10, 5400));
        write([1000, 8]); // others' frames count, too
        window.look(Instant::now());
        assert_eq!((window.queued.len(), window.bytes), (0, 0));
        window.note_sent(WINDOW_BYTES);
        assert!(!window.has_room(), "bytes count as well");
        // No counter tells of frames that were dropped before the queue.
        let later = window.still_since + STILL_MAX;
        window.look(later - Duration::from_millis(1));
        assert_eq!(window.queued.len(), 1);
        window.look(later);
        assert_eq!((window.queued.len(), window.bytes), (0, 0));
        // A VM that stands gets little more.
        window.note_sent(WINDOW_BYTES);
        window.look(later + FORGET - Duration::from_millis(1));
        assert!(!window.is_open());
        // One that has read something stands no more.
        write([1001, 8]);
        window.look(later);
        window.note_sent(WINDOW_BYTES);
        window.look(window.still_since + STILL_MAX);
        assert!(window.is_open());
        window.note_sent(WINDOW_BYTES);
        window.look(window.may_forget_at);
        assert!(window.is_open());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
