//! Extras of few seeds after everything else has healed: each is one fault by itself, between a
//! guest of the seed and an extra remote. Events that are rare among a hundred faults, and excused
//! because of them, are certain here, and only the host can cause a violation.

use nightporter_core::limits::PAGE;
use nightporter_core::time::{Duration, Instant};

use crate::plan::{
    ConnPlan, Fault, FaultKind, LinkPlan, Machine, Offloads, Plan, Quirks, RemotePlan, StackKind,
    StackPlan, Workload,
};
use crate::random::Random;

/// Between the healing and the later fault.
const AFTER: Duration = Duration::from_millis(300);

/// One of them: a seed's plan, its chances, and the guest it is about.
struct Later {
    plan: Plan,
    random: Random,
    guest: u16,
    /// When it begins.
    at: Instant,
}

/// A kind of fault, and the number of a hundred seeds with a fitting guest that have it.
type Kind = (&'static str, u32, fn(&mut Later));

const KINDS: [Kind; 21] = [
    ("conversation with losses in the guest", 8, Later::lossy_conversation),
    ("upload with losses in the guest", 8, Later::lossy_upload),
    ("deaf for a moment", 7, Later::deaf),
    ("days", 5, Later::days),
    ("urgent data", 5, Later::urgent),
    ("options of IP", 4, Later::ip_options),
    ("no clock in a SYN", 6, Later::no_clock),
    ("large retransmissions", 6, Later::large_retransmissions),
    ("second cookie", 5, Later::second_cookie),
    ("plain second SYN", 4, Later::plain_second_syn),
    ("resets of the guest", 5, Later::guest_resets),
    ("does not read for minutes", 4, Later::shut_for_minutes),
    ("little room, and silence", 4, Later::little_room),
    ("reset behind bytes", 4, Later::reset_behind_bytes),
    ("a window update is lost", 4, Later::lost_window_update),
    ("copies behind holes", 5, Later::copies_behind_holes),
    ("an MSS for another path", 4, Later::mss_of_another_path),
    ("takes nothing for minutes", 3, Later::refuses),
    ("a window that opens among data", 4, Later::opens_among_data),
    ("a stranger while bytes wait", 4, Later::stranger),
    ("a stranger in a long pause", 4, Later::stranger_in_pause),
];

impl Plan {
    /// See the module doc. Each has chances of its own: the rest of a seed stays as it is.
    #[must_use]
    pub(super) fn with_later(mut self) -> Self {
        for (name, percent, add) in KINDS {
            let mut random = Random::new(self.seed, name);
            let fits = |g: &crate::plan::GuestPlan| {
                let strict = g.stack.kind == StackKind::Strict && g.stack.syn_options.is_empty();
                strict && g.ack_offload && g.budget_bytes >= 24 * PAGE as u64 && g.flows_max >= 16
            };
            let guest = self.guests.iter().position(fits).and_then(|g| u16::try_from(g).ok());
            let Some(guest) = guest.filter(|_| random.percent(percent)) else { continue };
            let at = self.heal_at + AFTER;
            let mut later = Later { plan: self, random, guest, at };
            add(&mut later);
            self = later.plan;
        }
        self
    }
}

impl Later {
    /// A remote near by, with a plain TCP.
    fn remote(&mut self, quirks: Quirks) -> u16 {
        let mtu = 1500;
        let delay_us = self.random.pick(&[50, 500, 1_000]);
        let link = LinkPlan { rate_bps: 1_000_000_000, delay_us, queue_frames: 1000, mtu };
        let stack = StackPlan {
            kind: StackKind::Strict,
            receive_bytes: 400_000,
            send_bytes: 300_000,
            window_scale: Some(7),
            timestamps: true,
            sack: self.random.percent(70),
            ecn: false,
            mss: None,
            isn: None,
            syn_options: Vec::new(),
            first_segments: None,
            quirks,
        };
        let (to_host, from_host, offloads) = (link, link, Offloads::NONE);
        self.plan.remotes.push(RemotePlan { to_host, from_host, stack, offloads, shares: None });
        u16::try_from(self.plan.remotes.len() - 1).unwrap_or(0)
    }

    /// The same, with a round trip of 2 ms.
    fn remote_2_ms_away(&mut self) -> u16 {
        let remote = self.remote(Quirks::default());
        let r = self.remote_mut(remote);
        (r.to_host.delay_us, r.from_host.delay_us) = (1_000, 1_000);
        remote
    }

    fn remote_mut(&mut self, remote: u16) -> &mut RemotePlan {
        &mut self.plan.remotes[usize::from(remote)]
    }

    fn stack(&mut self) -> &mut StackPlan {
        &mut self.plan.guests[usize::from(self.guest)].stack
    }

    /// A connection that the remote opens, `ms` after the beginning.
    fn upload(&mut self, remote: u16, ms: u64, workload: Workload) {
        let (client, server) = (Machine::Remote(remote), Machine::Guest(self.guest));
        let opens_at = self.at + Duration::from_millis(ms);
        let conn = ConnPlan { client, server, v6: false, opens_at, workload, reuse: None };
        self.plan.conns.push(conn);
    }

    /// A fault, and as much more patience.
    fn fault(&mut self, after_us: u64, lasts: Duration, kind: FaultKind) {
        let at = self.at + Duration::from_micros(after_us);
        self.plan.faults.push(Fault { at, lasts, kind });
        self.plan.give_up_at = self.plan.give_up_at + lasts;
    }

    /// Requests and answers of which the guest loses some: none is followed by another segment that
    /// would tell, so that all wait for the timer.
    fn lossy_conversation(&mut self) {
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        let ppm = self.random.pick(&[100_000, 300_000]);
        let request = self.random.pick(&[500, 6_000]);
        self.upload(remote, 0, Workload::RequestResponse { request, response: 400, count: 60 });
        self.fault(5_000, Duration::from_secs(9), FaultKind::DropDelivered { guest, ppm });
    }

    /// Several losses in a window, one segment in a frame, and seldom SACK.
    fn lossy_upload(&mut self) {
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        let g = &mut self.plan.guests[usize::from(guest)];
        g.offloads = Offloads { tso4: false, tso6: false, ecn: false, ..g.offloads };
        let sack = self.random.percent(30);
        self.remote_mut(remote).stack.sack = sack;
        let ppm = self.random.pick(&[20_000, 60_000, 150_000]);
        let down = self.random.pick(&[0, 0, 300_000]);
        self.upload(remote, 0, Workload::Bulk { up: 600_000, down });
        self.fault(1_000, Duration::from_secs(5), FaultKind::DropDelivered { guest, ppm });
    }

    /// For a second or two it loses all frames: bytes under way are repeated, slowly at first.
    fn deaf(&mut self) {
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        self.upload(remote, 0, Workload::Bulk { up: 2_500_000, down: 0 });
        let (after_us, ms) = (self.random.within(4_000, 20_000), self.random.within(600, 4_000));
        let kind = FaultKind::DropDelivered { guest, ppm: 1_000_000 };
        self.fault(after_us, Duration::from_millis(ms), kind);
    }

    /// A connection that lives for longer than a clock takes half way round, and is asked for all
    /// the time; then somebody forges segments with an old clock, and some are late.
    fn days(&mut self) {
        let quirks = Quirks { asks_in_sleep: true, ..Quirks::default() };
        let (guest, remote) = (self.guest, self.remote(quirks));
        (self.stack().timestamps, self.stack().quirks.asks_in_sleep) = (true, true);
        let idle_s = self.random.pick(&[2_200_000, 3_000_000]);
        self.upload(remote, 0, Workload::Idle { idle_s });
        let wakes_us = u64::from(idle_s) * 1_000_000;
        let (from_us, lasts) = (wakes_us - 500_000, Duration::from_secs(2));
        self.fault(from_us, lasts, FaultKind::Forge { guest, per_ms: 1 });
        let late = FaultKind::Reorder { remote, to_host: true, ppm: 100_000, delay_us: 2_000 };
        self.fault(from_us, lasts, late);
        self.plan.give_up_at = self.plan.give_up_at + Duration::from_secs(idle_s.into());
    }

    fn urgent(&mut self) {
        let remote = self.remote(Quirks { urgent: true, ..Quirks::default() });
        self.upload(remote, 0, Workload::Bulk { up: 1_500_000, down: 0 });
    }

    fn ip_options(&mut self) {
        let remote = self.remote(Quirks { ip_options: true, ..Quirks::default() });
        self.upload(remote, 0, Workload::Bulk { up: 200_000, down: 50_000 });
    }

    /// A server says 0 in its SYN-ACK though its clock stands in the upper half.
    fn no_clock(&mut self) {
        let clock_first = Some(self.random.pick(&[0x8000_0100, 0xc000_0000]));
        let quirks = Quirks { no_clock_in_syn: true, clock_first, ..Quirks::default() };
        let remote = self.remote(quirks);
        self.stack().timestamps = true;
        self.upload(remote, 0, Workload::Bulk { up: 100, down: 300_000 });
        let conn = self.plan.conns.last_mut().expect("just added");
        std::mem::swap(&mut conn.client, &mut conn.server);
        if self.random.percent(50) {
            let kind = FaultKind::Loss { remote, to_host: true, ppm: 300_000 };
            self.fault(0, Duration::from_millis(50), kind);
        }
    }

    /// A sender without SACK repeats in super-segments, over what is there already.
    fn large_retransmissions(&mut self) {
        let remote = self.remote(Quirks { resends_whole: true, ..Quirks::default() });
        let r = self.remote_mut(remote);
        (r.offloads, r.stack.sack) = (Offloads::ALL, false);
        self.upload(remote, 0, Workload::Bulk { up: 2_500_000, down: 0 });
        let kind = FaultKind::Loss { remote, to_host: true, ppm: 200_000 };
        self.fault(500, Duration::from_secs(1), kind);
    }

    /// R's SYN comes again before its third ACK, and waits with that and R's data for a guest that
    /// has just lost its processor; then the guest answers with another cookie.
    fn second_cookie(&mut self) {
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        self.stack().quirks.syn_cookies = true;
        let r = self.remote_mut(remote);
        (r.to_host.delay_us, r.from_host.delay_us) = (2_000, 2_000);
        for n in 0..6 {
            self.upload(remote, n * 200, Workload::Bulk { up: 30_000, down: 0 });
            let at_us = n * 200_000 + 2_300;
            self.fault(at_us, Duration::from_millis(40), FaultKind::Pause { guest });
        }
        let delay_us = 3_500;
        let copies = FaultKind::Duplicate { remote, to_host: true, ppm: 700_000, delay_us };
        self.fault(0, Duration::from_secs(2), copies);
    }

    /// A SYN comes twice before it is answered, the second time without its options.
    fn plain_second_syn(&mut self) {
        let quirks = Quirks { plain_second_syn: true, ..Quirks::default() };
        let (guest, remote) = (self.guest, self.remote(quirks));
        self.upload(remote, 100, Workload::Bulk { up: 200_000, down: 50_000 });
        self.fault(0, Duration::from_millis(1_400), FaultKind::Pause { guest });
    }

    /// R resets as soon as all is acknowledged, and that is long before the guest has it.
    fn reset_behind_bytes(&mut self) {
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        self.upload(remote, 0, Workload::Reset { up: 100_000 });
        let kind = FaultKind::DropDelivered { guest, ppm: 1_000_000 };
        let lasts = Duration::from_secs(self.random.pick(&[2, 60]));
        self.fault(3_500, lasts, kind);
    }

    fn guest_resets(&mut self) {
        let remote = self.remote(Quirks::default());
        for n in 0..4 {
            self.upload(remote, n * 50, Workload::Reset { up: 50_000 });
            let conn = self.plan.conns.last_mut().expect("just added");
            std::mem::swap(&mut conn.client, &mut conn.server);
        }
    }

    /// Its window is shut for longer than the longest pause between two probes. smoltcp gives up on
    /// a FIN that nobody acknowledges.
    fn shut_for_minutes(&mut self) {
        let stacks = self.plan.guests.iter().map(|g| &g.stack);
        let mut stacks = stacks.chain(self.plan.remotes.iter().map(|r| &r.stack));
        if stacks.any(|stack| stack.kind == StackKind::Smoltcp) {
            return;
        }
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        let up = self.more_than_is_held();
        self.upload(remote, 0, Workload::Bulk { up, down: 0 });
        let kind = FaultKind::StopReading { machine: Machine::Guest(guest) };
        self.fault(2_000, Duration::from_secs(500), kind);
    }

    /// More bytes than guest and host hold together for an application that does not read.
    fn more_than_is_held(&mut self) -> u64 {
        let g = &mut self.plan.guests[usize::from(self.guest)];
        g.stack.receive_bytes = g.stack.receive_bytes.min(400_000);
        g.stack.receive_bytes as u64 + g.budget_bytes.min(4 << 20) + 100_000
    }

    /// All is taken, little room is left, and nothing happens for seconds.
    fn little_room(&mut self) {
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        let receive = &mut self.stack().receive_bytes;
        *receive = (*receive).clamp(16_000, 65_535);
        let request = *receive as u64 * 7 / 8;
        self.upload(remote, 0, Workload::RequestResponse { request, response: 100, count: 2 });
        let kind = FaultKind::StopReading { machine: Machine::Guest(guest) };
        self.fault(0, Duration::from_secs(5), kind);
    }

    /// Its window was shut, and R does not hear that it is open: nobody but the host repeats that
    /// before R's next probe.
    fn lost_window_update(&mut self) {
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        let up = self.more_than_is_held();
        self.upload(remote, 0, Workload::Bulk { up, down: 0 });
        let kind = FaultKind::StopReading { machine: Machine::Guest(guest) };
        self.fault(2_000, Duration::from_millis(2_000), kind);
        let kind = FaultKind::Cut { remote, to_host: false };
        self.fault(1_950_000, Duration::from_millis(400), kind);
    }

    /// R's segments come twice, the second time while one before them is missing.
    fn copies_behind_holes(&mut self) {
        let remote = self.remote(Quirks::default());
        self.stack().sack = true;
        let r = self.remote_mut(remote);
        (r.to_host.delay_us, r.from_host.delay_us, r.stack.sack) = (2_000, 2_000, true);
        self.upload(remote, 0, Workload::Bulk { up: 1_500_000, down: 0 });
        let lasts = Duration::from_secs(2);
        self.fault(0, lasts, FaultKind::Loss { remote, to_host: true, ppm: 20_000 });
        let (ppm, delay_us) = (300_000, 300);
        self.fault(0, lasts, FaultKind::Duplicate { remote, to_host: true, ppm, delay_us });
    }

    /// It offers an MSS that its port does not take (a route by another card with larger packets),
    /// in both families.
    fn mss_of_another_path(&mut self) {
        let mtu = self.plan.guests[usize::from(self.guest)].mtu;
        let guests = self.plan.guests.iter().map(|g| g.mtu);
        let paths = self.plan.remotes.iter().flat_map(|r| [r.to_host.mtu, r.from_host.mtu]);
        // A machine that may send larger packets would do so, and none would arrive.
        if mtu < 1500 || guests.chain(paths).any(|other| other > mtu) {
            return;
        }
        let remote = self.remote(Quirks::default());
        self.stack().mss = Some(mtu + 500);
        for v6 in [false, true] {
            self.upload(remote, 0, Workload::Bulk { up: 300_000, down: 0 });
            self.plan.conns.last_mut().expect("just added").v6 = v6;
        }
    }

    /// It runs, and takes nothing, for longer than it is given (SNOOP-32).
    fn refuses(&mut self) {
        let (guest, remote) = (self.guest, self.remote(Quirks::default()));
        self.upload(remote, 0, Workload::Bulk { up: 2_500_000, down: 0 });
        let kind = FaultKind::DropDelivered { guest, ppm: 1_000_000 };
        self.fault(4_000, Duration::from_secs(240), kind);
    }

    /// R's application reads at last, while R sends and its segments overtake each other: earlier
    /// segments show a smaller window.
    fn opens_among_data(&mut self) {
        let remote = self.remote_2_ms_away();
        self.upload(remote, 0, Workload::Bulk { up: 4_000_000, down: 150_000 });
        let kind = FaultKind::StopReading { machine: Machine::Remote(remote) };
        self.fault(0, Duration::from_millis(40), kind);
        let kind = FaultKind::Reorder { remote, to_host: true, ppm: 200_000, delay_us: 1_500 };
        self.fault(0, Duration::from_secs(1), kind);
    }

    /// All that R has sent is held for a guest that loses it; then somebody forges segments, so
    /// seldom that each is owed its answer.
    fn stranger(&mut self) {
        let (guest, remote) = (self.guest, self.remote_2_ms_away());
        self.upload(
            remote,
            0,
            Workload::RequestResponse { request: 9_000, response: 9, count: 99 },
        );
        let kind = FaultKind::DropDelivered { guest, ppm: 1_000_000 };
        self.fault(30_000, Duration::from_secs(9), kind);
        self.fault(1_000_000, Duration::from_secs(8), FaultKind::Forge { guest, per_ms: 0 });
    }

    /// The same in a pause, after which nobody is answered any more in the guest's name.
    fn stranger_in_pause(&mut self) {
        let (guest, remote) = (self.guest, self.remote_2_ms_away());
        self.upload(
            remote,
            0,
            Workload::RequestResponse { request: 9_000, response: 9, count: 99 },
        );
        self.fault(30_000, Duration::from_secs(80), FaultKind::Pause { guest });
        self.fault(64_000_000, Duration::from_secs(15), FaultKind::Forge { guest, per_ms: 0 });
    }
}
