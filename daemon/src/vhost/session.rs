//! One connection's device: the state that the messages have set up, and the handler for each
//! message.
//!
//! A session starts when a front-end connects and ends when it goes. Every message either changes
//! the session, or is refused and changes nothing. After each, rings whose conditions are met start
//! and the others stop:
//!
//! | a ring runs when | because |
//! |---|---|
//! | size, addresses and kick descriptor are set | GET_VRING_BASE takes the kick descriptor away |
//! | SET_FEATURES came | before that the header length is not known |
//! | its areas are in guest memory | a memory table may come late, or change |
//! | no log of writes is wanted, or one is mapped | else writes would be unmarked (LIFE-15) |
//! | it is enabled, or PROTOCOL_FEATURES was not negotiated | specification, "Ring states" |
//!
//! It does not wait for the first kick, because after a restart of the daemon under a running guest
//! there may be none. A disabled ring is left alone entirely. By the specification the frames of a
//! disabled transmit ring would be discarded, but UML disables rings whose memory it is about to
//! free.

mod logs;
pub(crate) mod record;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nightporter_core::port::PortFeatures;
use vhost::vhost_user::message::{
    FrontendReq as Req, VhostUserConfig, VhostUserMemory, VhostUserMemoryRegion,
    VhostUserProtocolFeatures as Protocol, VhostUserSingleMemoryRegion, VhostUserVringAddr,
    VhostUserVringState,
};
use vm_memory::ByteValued;

use super::device::{Device, DeviceQueue};
use super::dirty::DirtyLog;
use super::features::{self, MTU_MIN, Offer, bit};
use super::guest_mem::{self, GuestMemory, MemError, REGIONS_MAX};
use super::inflight::InflightLog;
use super::protocol::{FDS_MAX, Message, Refusal, Reply};
use super::queue::Layout;
use super::ring::{QUEUE_SIZE_MAX, Ring, RingAddrs, RingFault};
use super::signals::{Conduct, KickFd, Notifier, SlowCalls};
use super::vring::{Kick, Vring};
use super::{Event, Source};
use crate::charges::Share;
use crate::closer::Foreign;

/// SET_VRING_KICK, _CALL and _ERR: the queue's index is in the low byte, and this bit means that no
/// descriptor comes along.
const VRING_NO_FD: u64 = 1 << 8;
const VRING_INDEX_MASK: u64 = 0xff;
/// Longest configuration space that may be asked for (QEMU's VHOST_USER_MAX_CONFIG_SIZE).
const CONFIG_READ_MAX: u32 = 256;

/// Entries of the in-flight log that are free when a ring starts or stops, which most rings have.
const ENTRIES_PER_WORK: u16 = 512;

/// The state that one front-end has set up. See the module's doc.
#[derive(Debug)]
pub struct Session<D: Device = Offer> {
    offer: D,
    /// Memory may be of files that can shrink, and notifiers may be pipes or sockets.
    allows_unsealed: bool,
    protocol: Protocol,
    /// SET_FEATURES; `None` before it and after a reset.
    features: Option<u64>,
    status: u8,
    mtu: Option<u16>,
    /// Guest memory, for the data path.
    pub memory: GuestMemory,
    /// Receive queue, transmit queue, and so on in turn.
    pub vrings: Vec<Vring<D::Queue>>,
    /// How frames lie in buffers; meaningful while a ring of a network card runs.
    pub layout: Layout,
    /// How much of its memory it may share.
    share: Share,
    inflight: Option<InflightLog>,
    /// SET_LOG_BASE since the rings last stopped: a VMM whose guest reboots in mid-migration starts
    /// the rings again before it passes another log, and frees this one.
    log: Option<Arc<DirtyLog>>,
    /// Never written to; UML resets the device when it closes.
    backend_req: Option<Foreign>,
    /// How its descriptors behave.
    conduct: Arc<Conduct>,
    /// Entries of the in-flight log gone through, in [`ENTRIES_PER_WORK`].
    work: u32,
    link: Option<PortFeatures>,
    events: VecDeque<Event>,
}

impl<D: Device> Session<D> {
    /// A front-end has just connected.
    #[must_use]
    pub fn new(offer: D, allows_unsealed: bool) -> Self {
        Self {
            offer,
            allows_unsealed,
            protocol: Protocol::empty(),
            features: None,
            status: 0,
            mtu: None,
            memory: GuestMemory::default(),
            vrings: (0..offer.queues()).map(|_| Vring::default()).collect(),
            layout: features::layout(0),
            share: Share::default(),
            inflight: None,
            log: None,
            backend_req: None,
            conduct: Arc::default(),
            work: 0,
            link: None,
            events: VecDeque::new(),
        }
    }

    /// Adds the slow calls of its descriptors to the earlier ones.
    #[must_use]
    pub fn charged_to(mut self, slow: &Arc<SlowCalls>) -> Self {
        self.conduct = Arc::new(Conduct::new(slow));
        self
    }

    /// The front-end may share so much of its memory.
    #[must_use]
    pub(crate) fn sharing(mut self, share: Share) -> Self {
        self.share = share;
        self
    }

    /// The features that the driver accepts, while the first queue pair runs.
    #[must_use]
    pub const fn link(&self) -> Option<PortFeatures> {
        self.link
    }

    /// The virtio features that were negotiated; 0 before.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features.unwrap_or(0)
    }

    /// The MTU that the front-end has set (QEMU's `host_mtu`).
    #[must_use]
    pub const fn mtu(&self) -> Option<u16> {
        self.mtu
    }

    /// Whether a message may ask for a yes or no.
    #[must_use]
    pub const fn acknowledges(&self) -> bool {
        self.protocol.contains(Protocol::REPLY_ACK)
    }

    /// The kick descriptor of a ring.
    #[must_use]
    pub fn kick_fd(&self, vring: u16) -> Option<BorrowedFd<'_>> {
        match &self.vrings.get(usize::from(vring))?.kick {
            Kick::Fd(notifier) => Some(notifier.fd()),
            _ => None,
        }
    }

    /// Whether there is a ring without a descriptor for kicks, which must be polled.
    #[must_use]
    pub fn is_polled(&self) -> bool {
        self.vrings.iter().any(|vring| matches!(vring.kick, Kick::Polled))
    }

    /// The driver kicked. A descriptor that kicks no more is given up; the ring is then polled.
    pub fn handle_kick(&mut self, vring: u16) {
        let index = usize::from(vring);
        if let Some(Kick::Fd(kick)) = self.vrings.get(index).map(|v| &v.kick)
            && !kick.clear(&self.conduct)
        {
            self.replace_kick(index, Kick::Polled);
        }
    }

    /// Obeys one message. `Some` must be sent back; without it, the caller acknowledges if asked.
    pub fn handle(&mut self, mut message: Message) -> Result<Option<Reply>, Refusal> {
        let request = message.request().ok_or(Refusal::Unsupported(message.code))?;
        match self.answer(request, &mut message) {
            Ok(None) => self.obey(request, message)?,
            answered => return answered,
        }
        self.settle();
        Ok(None)
    }

    /// Where the rings of the first queue pair began when they last started.
    pub(crate) fn began_at(&self) -> [u16; 2] {
        self.of_first_pair(|vring| vring.began_at)
    }

    fn of_first_pair(&self, of: impl Fn(&Vring<D::Queue>) -> u16) -> [u16; 2] {
        [0, 1].map(|at| self.vrings.get(at).map_or(0, &of))
    }

    /// The connection is gone: everything that was set up goes with it. Returns the events, and
    /// where the rings of the first queue pair have stopped.
    pub fn close(mut self) -> (VecDeque<Event>, [u16; 2]) {
        for index in 0..self.vrings.len() {
            self.halt(index, false);
            self.replace_kick(index, Kick::None);
        }
        self.set_link(None);
        self.put_log(None);
        self.share.note(&self.memory, &GuestMemory::default());
        let stopped_at = self.of_first_pair(|vring| vring.base);
        (self.events, stopped_at)
    }

    /// Whether memory that the front-end gave us was not there when it was used.
    #[must_use]
    pub(crate) fn has_faulted(&self) -> bool {
        self.memory.has_faulted() || self.have_logs_faulted()
    }

    /// Whether a descriptor of the front-end kept us waiting.
    #[must_use]
    pub(crate) fn has_blocked(&self) -> bool {
        self.conduct.blocks()
    }

    /// The cost of starting and stopping rings since the last call: 1 for some hundred entries of
    /// the in-flight log, of which a ring has up to 32,768.
    #[must_use]
    pub(crate) fn take_work(&mut self) -> u32 {
        std::mem::take(&mut self.work)
    }

    /// A ring's guest broke the rules.
    pub fn fail(&mut self, vring: u16, fault: RingFault) {
        self.vrings[usize::from(vring)].fail(fault);
        self.events.push_back(Event::RingBroken { vring, fault });
        self.settle_link();
    }

    /// The events, in order.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Requests with an answer of their own; `None` for all others.
    fn answer(&mut self, request: Req, message: &mut Message) -> Result<Option<Reply>, Refusal> {
        Ok(Some(match request {
            Req::GET_FEATURES => Reply::of(self.offer.features(self.protocol)),
            Req::GET_PROTOCOL_FEATURES => Reply::of(self.offer.protocol().bits()),
            Req::GET_QUEUE_NUM => Reply::of(self.offer.queue_num()),
            Req::GET_MAX_MEM_SLOTS => Reply::of(REGIONS_MAX as u64),
            Req::GET_STATUS => Reply::of(u64::from(self.status)),
            Req::GET_CONFIG => self.config(message)?,
            Req::GET_VRING_BASE => self.stop_vring(message)?,
            Req::GET_INFLIGHT_FD => self.create_inflight(message)?,
            Req::SET_LOG_BASE if self.protocol.contains(Protocol::LOG_SHMFD) => {
                self.set_log(message)?
            }
            _ => return Ok(None),
        }))
    }

    /// Requests without an answer.
    fn obey(&mut self, request: Req, message: Message) -> Result<(), Refusal> {
        match request {
            // Nothing to own; and nothing in the configuration space is writable (virtio 5.1.4).
            Req::SET_OWNER | Req::SET_CONFIG => Ok(()),
            Req::SET_FEATURES => self.set_features(message.body(0)?),
            Req::SET_PROTOCOL_FEATURES => self.set_protocol_features(message.body(0)?),
            Req::SET_MEM_TABLE => self.set_mem_table(message),
            Req::ADD_MEM_REG => self.add_region(message),
            Req::REM_MEM_REG => self.remove_region(&message),
            Req::SET_VRING_NUM => self.set_vring_num(message.body(0)?),
            Req::SET_VRING_ADDR => self.set_vring_addr(message.body(0)?),
            Req::SET_VRING_BASE => self.set_vring_base(message.body(0)?),
            Req::SET_VRING_ENABLE => self.set_vring_enable(message.body(0)?),
            Req::SET_VRING_KICK | Req::SET_VRING_CALL | Req::SET_VRING_ERR => {
                self.set_vring_notifier(request, message)
            }
            Req::SET_INFLIGHT_FD => self.set_inflight(message),
            Req::SET_BACKEND_REQ_FD => self.set_backend_req(message),
            // It may be told of marks there. Front-ends that we know look for them by themselves.
            Req::SET_LOG_FD if self.protocol.contains(Protocol::LOG_SHMFD) => Ok(()),
            Req::NET_SET_MTU | Req::SEND_RARP if !self.offer.is_network_card() => {
                Err(Refusal::Unsupported(message.code))
            }
            Req::NET_SET_MTU => self.set_mtu(message.body(0)?),
            Req::SEND_RARP => self.rarp(message.body(0)?),
            Req::SET_STATUS => self.set_status(message.body(0)?),
            // "Used to be sent to request disabling all rings"; RESET_DEVICE does that as well.
            Req::RESET_OWNER | Req::RESET_DEVICE => {
                self.reset();
                Ok(())
            }
            _ => Err(Refusal::Unsupported(message.code)),
        }
    }

    fn config(&self, message: &Message) -> Result<Reply, Refusal> {
        let want: VhostUserConfig = message.body(0)?;
        let (offset, size) = (want.offset, want.size);
        if size > CONFIG_READ_MAX || offset > CONFIG_READ_MAX {
            // "The back-end must use a zero-length payload to indicate an error."
            return Ok(Reply::default());
        }
        let mut payload = want.as_slice().to_vec();
        payload.extend(self.offer.config(offset as usize, size as usize));
        Ok(Reply { payload, fd: None })
    }

    fn stop_vring(&mut self, message: &Message) -> Result<Reply, Refusal> {
        let state: VhostUserVringState = message.body(0)?;
        let index = self.index(state.index)?;
        self.stop(index);
        self.check_log()?;
        self.replace_kick(index, Kick::None);
        self.forget_log();
        self.settle();
        let base = u32::from(self.vrings[index].base);
        Ok(Reply::of(VhostUserVringState::new(state.index, base)))
    }

    fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        let extra = features & !self.offer.features(Protocol::all());
        if extra != 0 {
            return Err(Refusal::Features(extra));
        }
        self.put_features(Some(features));
        self.layout = features::layout(features);
        for queue in self.vrings.iter_mut().filter_map(|v| v.queue.as_mut()) {
            queue.ring().set_features(features::ring_features(features));
        }
        Ok(())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<(), Refusal> {
        let extra = features & !self.offer.protocol().bits();
        if extra != 0 {
            return Err(Refusal::Features(extra));
        }
        self.protocol = Protocol::from_bits_truncate(features);
        Ok(())
    }

    /// UML 6.1 names one region and sends a payload for two; the unnamed rest is ignored.
    fn set_mem_table(&mut self, message: Message) -> Result<(), Refusal> {
        let count = message.body::<VhostUserMemory>(0)?.num_regions as usize;
        if count > FDS_MAX || message.fds.len() < count {
            return Err(Refusal::NoDescriptor);
        }
        let at = |i| size_of::<VhostUserMemory>() + i * size_of::<VhostUserMemoryRegion>();
        let regions: Result<Vec<_>, _> = (0..count).map(|i| message.body(at(i))).collect();
        message.fds.iter().take(count).try_for_each(|file| self.check_seal(file))?;
        let memory = GuestMemory::new(regions?.into_iter().zip(message.fds))?;
        self.share.check(&memory, memory.len())?;
        self.share.note(&self.memory, &memory);
        self.memory = memory;
        self.remap();
        Ok(())
    }

    fn add_region(&mut self, mut message: Message) -> Result<(), Refusal> {
        let file = message.take_fd()?;
        self.check_seal(&file)?;
        let spec: VhostUserSingleMemoryRegion = message.body(0)?;
        self.memory.add(&spec, file)?;
        if let Err(error) = self.share.check(&self.memory, spec.memory_size) {
            self.memory.remove(&spec)?;
            return Err(error.into());
        }
        self.remap();
        Ok(())
    }

    fn check_seal(&self, file: &Foreign) -> Result<(), MemError> {
        let good = self.allows_unsealed || guest_mem::is_sealed(file);
        if good { Ok(()) } else { Err(MemError::Unsealed) }
    }

    /// Newer front-ends send a descriptor along; it is closed with the message.
    fn remove_region(&mut self, message: &Message) -> Result<(), Refusal> {
        let spec: VhostUserSingleMemoryRegion = message.body(0)?;
        let (file, len) = self.memory.remove(&spec)?;
        self.share.note_file(file, len, &self.memory);
        self.remap();
        Ok(())
    }

    /// Running rings find themselves again in changed memory. One that cannot is stopped, which
    /// loses nothing; it goes on when a later message maps it again.
    fn remap(&mut self) {
        for index in 0..self.vrings.len() {
            let vring = &mut self.vrings[index];
            if let (Some(queue), Some(addrs)) = (&mut vring.queue, vring.addrs)
                && queue.ring().remap(&self.memory, addrs).is_err()
            {
                self.stop(index);
            }
        }
    }

    fn set_vring_num(&mut self, state: VhostUserVringState) -> Result<(), Refusal> {
        let index = self.index(state.index)?;
        let size = u16::try_from(state.num)
            .ok()
            .filter(|n| n.is_power_of_two() && *n <= QUEUE_SIZE_MAX)
            .ok_or(Refusal::Value("a queue size must be a power of two up to 32768"))?;
        let vring = &mut self.vrings[index];
        if vring.queue.is_some() && vring.size != size {
            return Err(Refusal::Value("the size of a running queue cannot change"));
        }
        vring.size = size;
        Ok(())
    }

    fn set_vring_addr(&mut self, addr: VhostUserVringAddr) -> Result<(), Refusal> {
        let index = self.index(addr.index)?;
        let addrs = RingAddrs { desc: addr.descriptor, avail: addr.available, used: addr.used };
        let vring = &mut self.vrings[index];
        if let Some(queue) = &mut vring.queue {
            queue.ring().remap(&self.memory, addrs)?;
        }
        vring.addrs = Some(addrs);
        Ok(())
    }

    /// Kept for GET_VRING_BASE on a ring that never runs. One that does starts at its own used
    /// index. That is the same for an honest front-end, and right for one that lost count while the
    /// daemon was away (`ring`, invariant 2).
    fn set_vring_base(&mut self, state: VhostUserVringState) -> Result<(), Refusal> {
        let index = self.index(state.index)?;
        let base = u16::try_from(state.num);
        self.vrings[index].base = base.map_err(|_| Refusal::Value("a base is 16 bits"))?;
        Ok(())
    }

    /// QEMU sends this before SET_FEATURES, when the device is made; it is remembered.
    fn set_vring_enable(&mut self, state: VhostUserVringState) -> Result<(), Refusal> {
        let index = self.index(state.index)?;
        if state.num > 1 {
            return Err(Refusal::Value("a queue is enabled (1) or disabled (0)"));
        }
        self.vrings[index].enabled = state.num == 1;
        Ok(())
    }

    fn set_vring_notifier(&mut self, request: Req, mut message: Message) -> Result<(), Refusal> {
        let what: u64 = message.body(0)?;
        let index = self.index(u32::try_from(what & VRING_INDEX_MASK).expect("eight bits"))?;
        let fd = if what & VRING_NO_FD == 0 { Some(message.take_fd()?) } else { None };
        let (conduct, takes_pipes) = (&self.conduct, self.allows_unsealed);
        if request == Req::SET_VRING_KICK {
            let kick = fd.map(|fd| KickFd::new(fd, takes_pipes)).transpose()?;
            self.replace_kick(index, kick.map_or(Kick::Polled, Kick::Fd));
            return Ok(());
        }
        let notifier = fd.map(|fd| Notifier::new(fd, conduct, takes_pipes)).transpose()?;
        let vring = &mut self.vrings[index];
        match request {
            Req::SET_VRING_CALL => vring.call = notifier,
            _ => vring.err = notifier,
        }
        Ok(())
    }

    fn set_backend_req(&mut self, mut message: Message) -> Result<(), Refusal> {
        self.backend_req = Some(message.take_fd()?);
        Ok(())
    }

    fn set_mtu(&mut self, mtu: u64) -> Result<(), Refusal> {
        let mtu = u16::try_from(mtu).ok().filter(|m| *m >= MTU_MIN);
        self.mtu = Some(mtu.ok_or(Refusal::Value("an MTU is 68 to 65535"))?);
        Ok(())
    }

    /// The MAC is in the first six bytes of the value.
    fn rarp(&mut self, value: u64) -> Result<(), Refusal> {
        let [a, b, c, d, e, f, ..] = value.to_ne_bytes();
        self.events.push_back(Event::Rarp([a, b, c, d, e, f]));
        Ok(())
    }

    /// A status of 0 is the driver's reset (virtio 1.2 section 2.1).
    fn set_status(&mut self, status: u64) -> Result<(), Refusal> {
        self.status = u8::try_from(status).map_err(|_| Refusal::Value("a status is one byte"))?;
        if self.status == 0 {
            self.reset();
        }
        Ok(())
    }

    /// Resets the device, except the parts that belong to the connection: memory (front-ends with
    /// memory slots send only changes), call and error descriptors (QEMU does not repeat them), and
    /// protocol features.
    fn reset(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
            self.replace_kick(index, Kick::None);
            self.vrings[index].enabled = false;
            self.vrings[index].addrs = None;
        }
        self.put_features(None);
        self.status = 0;
        self.forget_log();
    }

    /// Starts the rings that can run, stops those that cannot, and reports whether the link is up.
    fn settle(&mut self) {
        for index in 0..self.vrings.len() {
            let vring = &self.vrings[index];
            let features = self.features.filter(|f| {
                vring.is_configured()
                    && (vring.enabled || f & bit::PROTOCOL_FEATURES == 0)
                    && (self.log.is_some() || f & bit::LOG_ALL == 0)
            });
            match features {
                Some(features) if vring.queue.is_none() => self.start(index, features),
                None => self.stop(index),
                Some(_) => {}
            }
        }
        self.settle_log();
        self.settle_link();
    }

    /// The link is up as long as both queues of the first pair are in use, and the guest has broken
    /// the rules of none: frames that it would send there go nowhere.
    fn settle_link(&mut self) {
        let up = self.vrings.iter().take(2).all(|vring| vring.queue.is_some())
            && self.vrings.iter().all(|vring| vring.fault.is_none());
        self.set_link(self.features.filter(|_| up).map(features::port_features));
    }

    /// Starts a ring. If it lies outside guest memory that is reported once, and tried again after
    /// every message.
    fn start(&mut self, index: usize, features: u64) {
        let number = number(index);
        let vring = &mut self.vrings[index];
        let addrs = vring.addrs.expect("configured");
        // Even without its place in the log the used index shows where to go on.
        let log = self.inflight.as_ref().and_then(|log| log.queue(number, vring.size));
        let features = features::ring_features(features);
        self.work += log.as_ref().map_or(0, |_| u32::from(vring.size / ENTRIES_PER_WORK));
        match Ring::start(&self.memory, addrs, vring.size, features, log) {
            Ok(ring) => {
                vring.fault = None;
                vring.marks = ring.driver_marks();
                vring.began_at = ring.base();
                vring.queue = Some(D::Queue::new(ring));
                self.events.push_back(Event::RingStarted(number));
            }
            Err(fault) if vring.fault != Some(fault) => self.fail(number, fault),
            Err(_) => {}
        }
    }

    /// The driver or the front-end stops a ring: nothing stays in flight.
    fn stop(&mut self, index: usize) {
        self.halt(index, true);
    }

    fn halt(&mut self, index: usize, in_order: bool) {
        if self.vrings[index].stop(in_order) {
            let size = self.vrings[index].size;
            self.work += self.inflight.as_ref().map_or(0, |_| u32::from(size / ENTRIES_PER_WORK));
            self.events.push_back(Event::RingStopped(number(index)));
        }
    }

    fn replace_kick(&mut self, index: usize, kick: Kick) {
        if let Kick::Fd(old) = std::mem::replace(&mut self.vrings[index].kick, kick) {
            self.events.push_back(Event::Unwatch(old.into_fd()));
        }
        match self.vrings[index].kick {
            Kick::Fd(_) => self.events.push_back(Event::Watch(Source::Kick(number(index)))),
            Kick::Polled => self.events.push_back(Event::Poll),
            Kick::None => {}
        }
    }

    fn set_link(&mut self, link: Option<PortFeatures>) {
        if self.link != link {
            self.link = link;
            self.events.push_back(Event::Link(link));
        }
    }

    fn index(&self, index: u32) -> Result<usize, Refusal> {
        let known = usize::try_from(index).ok().filter(|i| *i < self.vrings.len());
        known.ok_or(Refusal::NoQueue(index))
    }
}

fn number(index: usize) -> u16 {
    u16::try_from(index).expect("at most 256 queues")
}
