//! The monitor on connections that are written out, frame by frame.

use nightporter_check::wire::{Segment, TcpFlags, build};
use nightporter_core::monitor::headers::Headers;
use nightporter_core::monitor::limited::Limit;
use nightporter_core::monitor::log::HEAD;
use nightporter_core::monitor::{Frame, Monitor, Settings, Side, Way};
use nightporter_core::time::Instant;

use Side::{Guest, Net};
use Way::{FromGuest, ToGuest};

/// The first numbers of R's and G's data: R's wraps within a few segments.
const ISN: [u32; 2] = [u32::MAX - 2000, 77];
const SCALE: u8 = 7;

/// A monitor, and what it is told.
struct Scene {
    monitor: Monitor,
    headers: Headers,
    now: Instant,
    r_port: u16,
    tags: Vec<[u8; 4]>,
    is_v6: bool,
}

/// A segment: first byte and length of its data, and what it acknowledges, from 1 on.
#[derive(Clone, Copy, Default)]
struct Numbers {
    seq: u32,
    len: u32,
    ack: u32,
    window: Option<u16>,
}

fn data(seq: u32, len: u32) -> Numbers {
    Numbers { seq, len, ack: 1, window: None }
}

fn ack(ack: u32) -> Numbers {
    Numbers { seq: 1, len: 0, ack, window: None }
}

impl Scene {
    fn new(settings: Settings) -> Self {
        let (monitor, headers) = (Monitor::new(settings), Headers::default());
        let now = Instant::from_secs(9);
        Self { monitor, headers, now, r_port: 4000, tags: Vec::new(), is_v6: false }
    }

    fn at_us(&mut self, us: u64) -> &mut Self {
        self.now = Instant::from_secs(9) + nightporter_core::time::Duration::from_micros(us);
        self
    }

    /// A frame, of which only the headers are made.
    fn sees(&mut self, side: Side, way: Way, flags: TcpFlags, n: Numbers) -> &mut Self {
        let [r, g] = [[10, 0, 0, 9], [10, 0, 0, 2]].map(|v4: [u8; 4]| match self.is_v6 {
            false => std::net::IpAddr::from(v4),
            true => std::net::Ipv4Addr::from(v4).to_ipv6_compatible().into(),
        });
        let scale = [3, 3, SCALE, 1];
        let mut s = Segment {
            tags: self.tags.clone(),
            flags,
            window: n.window.unwrap_or(500),
            options: if flags.syn() { scale.to_vec() } else { Vec::new() },
            ..Segment::default()
        };
        let (own, other) = (ISN[way as usize], ISN[way.back() as usize]);
        (s.seq, s.ack) = (own.wrapping_add(n.seq), other.wrapping_add(n.ack));
        let ends = match way {
            ToGuest => (r, g, self.r_port, 80),
            FromGuest => (g, r, 80, self.r_port),
        };
        (s.src, s.dst, s.src_port, s.dst_port) = ends;
        let mut head = build(&s, &[]);
        let l3 = 14 + 4 * self.tags.len();
        let at = if self.is_v6 { l3 + 4..l3 + 6 } else { l3 + 2..l3 + 4 };
        let len = u16::from_be_bytes([head[at.start], head[at.start + 1]]);
        let len = len + u16::try_from(n.len).unwrap();
        head[at].copy_from_slice(&len.to_be_bytes());
        let len = u32::try_from(head.len()).unwrap() + n.len;
        let packet = self.headers.parse(&head, len as usize).unwrap();
        let frame = Frame { at: self.now, vm: 0, side, way, len, packet: &packet };
        self.monitor.handle(&frame);
        self
    }

    fn plain(&mut self, side: Side, way: Way, n: Numbers) -> &mut Self {
        self.sees(side, way, TcpFlags::ACK, n)
    }

    /// R's SYN at 0, G's answer at 10 ms, the path's round trip 40 ms.
    fn open(&mut self) -> &mut Self {
        let (syn, syn_ack) = (TcpFlags::SYN, TcpFlags::SYN | TcpFlags::ACK);
        let first = Numbers::default();
        self.at_us(0).sees(Net, ToGuest, syn, first);
        self.at_us(20).sees(Guest, ToGuest, syn, first);
        let answer = Numbers { ack: 1, ..first };
        self.at_us(10_000).sees(Guest, FromGuest, syn_ack, answer);
        self.at_us(10_010).sees(Net, FromGuest, syn_ack, answer);
        self.at_us(50_000).plain(Net, ToGuest, ack(1));
        self.at_us(50_020).plain(Guest, ToGuest, ack(1))
    }
}

#[test]
fn the_delay_of_a_segment_is_the_networks_the_hosts_and_the_guests() {
    let mut s = Scene::new(Settings::default());
    s.open();
    // Two segments of R, one of which waits in the host until the guest takes the first.
    s.at_us(50_100).plain(Net, ToGuest, data(1, 1000));
    s.at_us(50_110).plain(Net, FromGuest, ack(1001)); // early
    s.at_us(50_120).plain(Guest, ToGuest, data(1, 1000));
    s.at_us(50_200).plain(Net, ToGuest, data(1001, 1000));
    s.at_us(50_210).plain(Net, FromGuest, ack(2001)); // early
    s.at_us(80_100).plain(Guest, FromGuest, ack(1001));
    s.at_us(80_110).plain(Guest, ToGuest, data(1001, 1000));
    s.at_us(80_150).plain(Guest, FromGuest, ack(2001));
    s.at_us(90_250).plain(Net, ToGuest, data(2001, 1000)); // R has heard of the first two
    s.at_us(90_251).plain(Guest, ToGuest, data(2001, 1000));
    s.at_us(90_260).plain(Guest, FromGuest, ack(3001));
    s.at_us(90_261).plain(Net, FromGuest, ack(3001)); // the guest's own
    let flow = &s.monitor.flows()[0];
    let us = |d: nightporter_core::time::Duration| d.as_nanos() / 1000;

    let between = flow.between(ToGuest).unwrap();
    assert_eq!(between.delay.count(), 3);
    assert_eq!((us(between.delay.sum()), us(between.delay.longest())), (29_931, 29_910));
    assert_eq!((between.early_bytes, between.own_bytes, between.backwards), (2000, 1000, 0));
    assert_eq!((between.lead.count(), us(between.lead.sum())), (2, 29_990 + 29_940));

    let to_guest = flow.stream(Guest, ToGuest).unwrap();
    assert_eq!(us(to_guest.round_trip.segments.sum()), 9_980 + 29_980 + 40 + 9);
    assert_eq!(us(to_guest.limited.busy()), us(to_guest.round_trip.segments.sum()));
    let at_net = flow.stream(Net, ToGuest).unwrap();
    assert_eq!(us(at_net.turnaround.times.sum()), 90 + 40_040);
    assert_eq!((at_net.acked_bytes, at_net.acks, at_net.order.segments), (3000, 3, 4));
    assert_eq!(at_net.limited.time(Limit::Window).as_millis(), 0);
    let from_guest = flow.stream(Net, FromGuest).unwrap();
    assert_eq!(us(from_guest.round_trip.acks.sum()), 39_990, "the SYN-ACK");
    assert_eq!(flow.first_round_trip(Net).map(us), Some(50_000));
    let traffic = s.monitor.vms()[0].traffic(Net, FromGuest);
    assert_eq!((traffic.frames, traffic.bytes), (4, 58 + 3 * 54));
}

#[test]
fn numbers_wrap_with_tags_over_ipv6_and_with_super_segments() {
    const LEN: u32 = 60_000;
    let mut s = Scene::new(Settings::default());
    (s.tags, s.is_v6) = (vec![[0x88, 0xa8, 0, 5], [0x81, 0, 0, 7]], true);
    s.open();
    // 4.8 GB: each number comes more than once.
    for n in 0..80_000_u32 {
        let at = n.wrapping_mul(LEN).wrapping_add(1);
        s.at_us(100_000 + 500 * u64::from(n)).plain(Net, ToGuest, data(at, LEN));
        s.plain(Net, FromGuest, ack(at.wrapping_add(LEN)));
    }
    let [flow] = s.monitor.flows() else { panic!("one connection") };
    assert!(flow.key().to_string().contains("vlan 5.7"), "{}", flow.key());
    let stream = flow.stream(Net, ToGuest).unwrap();
    assert_eq!(stream.acked_bytes, 80_000 * u64::from(LEN));
    let order = &stream.order;
    assert_eq!((order.gaps, order.retransmissions(), order.out_of_order), (0, 0, 0));
    assert_eq!(stream.per_second.mean(), Some(2000.0 * f64::from(LEN)));
    assert_eq!(stream.density.bars()[20], 79_999, "an ACK each 0.5 ms");
    assert_eq!(stream.bursts.above(), 40_000, "960 Mbit/s in each millisecond");
}

#[test]
fn windows_probes_and_what_holds_a_sender_back() {
    let mut s = Scene::new(Settings::default());
    s.open();
    let room = 500 << SCALE;
    s.at_us(60_000).plain(Net, ToGuest, data(1, room)); // all there is room for
    s.at_us(61_000).plain(Net, FromGuest, Numbers { window: Some(0), ..ack(room + 1) });
    s.at_us(62_000).plain(Net, ToGuest, data(room + 1, 1)); // a probe
    s.plain(Net, FromGuest, Numbers { window: Some(0), ..ack(room + 1) });
    s.at_us(63_000).plain(Net, ToGuest, data(room, 1)); // a keepalive
    s.at_us(64_000).plain(Net, FromGuest, ack(room + 1));
    s.at_us(65_000).plain(Net, ToGuest, data(room + 1, 1000));
    s.at_us(66_000).plain(Net, FromGuest, ack(room + 1));
    s.plain(Net, FromGuest, ack(room + 1));
    s.at_us(70_000).plain(Net, ToGuest, data(room + 1, 1000));
    let stream = s.monitor.flows()[0].stream(Net, ToGuest).unwrap();
    assert_eq!((stream.windows.zero, stream.windows.full, stream.probes), (2, 1, 2));
    assert_eq!((stream.duplicate_acks, stream.order.repeated), (2, 1));
    let ms =
        [Limit::Sender, Limit::Window, Limit::Path].map(|l| stream.limited.time(l).as_millis());
    assert_eq!(ms, [49 + 1, 1 + 3, 10 + 5]);
}

#[test]
fn a_name_that_is_used_again_is_another_connection() {
    let mut s = Scene::new(Settings { flows_max: 2, ..Settings::default() });
    s.open();
    s.at_us(60_000).plain(Net, ToGuest, data(1, 100));
    let (syn, early) = (TcpFlags::SYN, Numbers { seq: 5_000_000, ..Numbers::default() });
    s.at_us(70_000).sees(Net, ToGuest, syn, early);
    s.at_us(70_001).sees(Guest, ToGuest, syn, early);
    s.at_us(71_000).sees(Net, ToGuest, syn, early); // repeated
    assert_eq!(s.monitor.flows().len(), 2);
    assert_eq!(s.monitor.flows()[1].stream(Net, ToGuest).unwrap().order.repeated, 1);
    // The third finds no place, and is not taken for the second.
    s.at_us(90_000).sees(Net, ToGuest, syn, Numbers { seq: 9_000_000, ..early });
    s.at_us(91_000).plain(Net, ToGuest, data(9_000_001, 100));
    assert_eq!((s.monitor.flows().len(), s.monitor.unwatched()), (2, 2));
    assert_eq!(s.monitor.flows()[1].duration().as_millis(), 1);
}

#[test]
fn what_the_data_path_logs_is_enough() {
    let s = Segment {
        tags: vec![[0x88, 0xa8, 0, 5], [0x81, 0, 0, 7]],
        src: std::net::Ipv6Addr::LOCALHOST.into(),
        dst: std::net::Ipv6Addr::LOCALHOST.into(),
        flags: TcpFlags::ACK,
        timestamps: Some((1, 2)),
        sack: vec![(1, 2), (3, 4), (5, 6)],
        ..Segment::default()
    };
    let frame = build(&s, &[0; 20_000]);
    // 22 + 40 + 60 bytes: nothing to spare.
    let packet = Headers::default().parse(&frame[..HEAD], frame.len()).unwrap();
    assert_eq!(packet.tcp().unwrap().1.payload_len, 20_000);
    assert!(Headers::default().parse(&frame[..HEAD - 1], frame.len()).is_err());
}
