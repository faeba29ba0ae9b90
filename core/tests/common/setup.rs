//! The start of a trace: addresses, options of both ends, budget. Everything can be switched.

use super::world::{Peer, Side, World};
use nightporter_core::congestion::Algorithm;
use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::limits::PAGE;
use nightporter_core::port::Local;
use nightporter_core::port::{GuestConfig, PortFeatures, Vlans};
use nightporter_core::store::arena::Arena;
use nightporter_core::time::Instant;
use zerocopy::IntoBytes;

/// Everything a guest driver can take.
pub const ALL_FEATURES: PortFeatures = PortFeatures { uso: false, ..PortFeatures::ALL };

/// The two ends of a connection and the engine between them. Index 0 is R, index 1 is G.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Initial sequence numbers.
    pub isn: [u32; 2],
    /// Payload bytes of a full segment, timestamps already subtracted.
    pub mss: u16,
    /// G's MSS option says another number.
    pub guest_mss: Option<u16>,
    /// Window shifts offered.
    pub scale: [Option<u8>; 2],
    /// Timestamps offered.
    pub ts: [bool; 2],
    /// SACK-Permitted offered.
    pub sack: [bool; 2],
    /// Classic ECN offered and accepted.
    pub ecn: bool,
    /// Raw options on the SYN and on the SYN-ACK, as hex.
    pub syn_options: [&'static str; 2],
    /// Windows in bytes; a multiple of what the shift can say, and below 64 KiB for the handshake.
    pub window: [u32; 2],
    /// TSval that `<ts 0>` stands for.
    pub clock: [u32; 2],
    /// IPv6 instead of IPv4.
    pub v6: bool,
    /// VLAN tags of the connection.
    pub vlan: Vec<[u8; 4]>,
    /// G opens.
    pub guest_is_client: bool,
    /// R is a VM of the same engine, with ack offload of its own (COM-32).
    pub remote_is_vm: bool,
    /// G is a station behind a trusted guest, which has another MAC.
    pub is_station: bool,
    /// G's port and the uplink are the ends of a wire.
    pub wire: bool,
    /// Ack offload wanted.
    pub offload: bool,
    /// Which connections end in the guest.
    pub local: Local,
    /// Congestion offload wanted.
    pub floods: bool,
    /// By which H sends for G.
    pub algorithm: Algorithm,
    /// Budget of each VM in bytes.
    pub budget_bytes: u64,
    /// Flow entries of each VM.
    pub flows_max: u32,
    /// Flows that a command for all flows of a VM takes at once.
    pub flows_per_step: Option<u32>,
    /// Features of G's driver.
    pub features: PortFeatures,
    /// MTU of the guest ports.
    pub mtu: u16,
    /// Pages and records of the arena.
    pub arena: (usize, usize),
    /// When the world starts.
    pub start: Instant,
}

impl Setup {
    /// The usual: mss 1000, shift 7, timestamps and SACK, sequence numbers and clocks that wrap.
    pub fn new() -> Self {
        Self {
            isn: [0xffff_ff00, 10_000],
            mss: 1000,
            guest_mss: None,
            scale: [Some(7), Some(7)],
            ts: [true; 2],
            sack: [true; 2],
            ecn: false,
            syn_options: [""; 2],
            window: [64_000, 64_000],
            clock: [0xffff_fe00, 5_000_000],
            v6: false,
            vlan: Vec::new(),
            guest_is_client: false,
            remote_is_vm: false,
            is_station: false,
            wire: false,
            offload: true,
            local: Local::Auto,
            floods: false,
            algorithm: Algorithm::default(),
            budget_bytes: 8 << 20,
            flows_max: 64,
            flows_per_step: None,
            features: ALL_FEATURES,
            mtu: 1500,
            arena: (1024, 128),
            start: Instant::from_millis(1_000_000),
        }
    }

    /// Both have timestamps, and so on.
    pub fn both(flags: [bool; 2]) -> bool {
        flags[0] && flags[1]
    }

    /// An engine and its ports, with no connection yet.
    pub fn opens(&self) -> World<'static> {
        let len = self.memory_len();
        self.opens_in(vec![0_u64; len / 8].leak().as_mut_bytes())
    }

    /// As [`Self::opens`] in the memory of the caller, [`Self::memory_len`] bytes.
    pub fn opens_in<'m>(&self, memory: &'m mut [u8]) -> World<'m> {
        let (pages, records) = self.arena;
        let arena = Arena::format(memory, records, pages, 1).expect("the length fits");
        self.opens_over(arena)
    }

    /// As a restarted daemon: over memory that another engine left (LIFE-09).
    pub fn reopens_in<'m>(&self, memory: &'m mut [u8]) -> World<'m> {
        self.opens_over(Arena::open(memory).expect("an arena"))
    }

    fn opens_over<'m>(&self, arena: Arena<'m>) -> World<'m> {
        let config = EngineConfig::new(4096, [1, 2, 3, 4]);
        let flows_per_step = self.flows_per_step.unwrap_or(config.flows_per_step);
        let config = EngineConfig { flows_per_step, ..config };
        World::new(Engine::new(self.start, config, arena), self.clone())
    }

    /// Bytes of arena memory.
    pub fn memory_len(&self) -> usize {
        Arena::layout_len(self.arena.1, self.arena.0)
    }

    /// A connection that has shaken hands; both inboxes are empty.
    pub fn established(&self) -> (World<'static>, Peer<'static>, Peer<'static>) {
        let world = self.opens();
        let (r, g) = world.connects();
        (world, r, g)
    }

    /// The engine's view of a guest port.
    pub fn guest_config(&self, mut mac: [u8; 6]) -> GuestConfig {
        mac[5] ^= if self.is_station { 0x80 } else { 0 };
        GuestConfig {
            mac: Some(mac),
            ips: None,
            isolated: false,
            trusted: self.is_station,
            vlans: Vlans::Any,
            ack_offload: self.offload,
            local: self.local,
            guest_ttl: None,
            congestion_offload: self.floods,
            congestion_control: self.algorithm,
            budget_bytes: self.budget_bytes,
            flows_max: self.flows_max,
            mtu: self.mtu,
        }
    }

    /// The options of a SYN of `side`, whole words. The MSS is what leaves room for timestamps.
    pub fn options_of(&self, side: Side) -> Vec<u8> {
        let i = side as usize;
        let mss = self.guest_mss.filter(|_| side == Side::G).unwrap_or(self.mss);
        let mss = mss + if Self::both(self.ts) { 12 } else { 0 };
        let [hi, lo] = mss.to_be_bytes();
        let mut options = vec![2, 4, hi, lo];
        if self.sack[i] {
            options.extend([4, 2]);
        }
        if let Some(shift) = self.scale[i] {
            options.extend([3, 3, shift]);
        }
        let hex = self.syn_options[i].replace(' ', "");
        options.extend(
            (0..hex.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")),
        );
        options.resize(options.len().next_multiple_of(4), 1);
        options
    }

    /// The smallest arena that serves: for tests that make many worlds.
    pub fn small(mut self) -> Self {
        self.arena = (usize::try_from(self.budget_bytes).expect("small") / PAGE, 16);
        self
    }
}
