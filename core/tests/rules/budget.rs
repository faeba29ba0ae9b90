//! SNOOP-39, INV-06, INV-20: what the flows of a VM share, who gets how much, and what becomes of
//! those for whom nothing is left.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, warms_up};
use nightporter_core::limits::{self, PAGE, pages_for};
use nightporter_core::tcp::flow::{State, Why};

const MIB: u32 = 1 << 20;

/// A VM of so many pages, both of whose ends can show windows of 32 MiB.
fn pages(pages: usize) -> Setup {
    let budget_bytes = (pages * PAGE) as u64;
    let arena = (pages, 512);
    Setup { budget_bytes, arena, scale: [Some(7), Some(10)], flows_max: 512, ..Setup::new() }
}

fn reserved(w: &World<'_>) -> u64 {
    w.engine(|e, _| e.vm(GUEST).map(|vm| vm.reserved_pages)).expect("a VM")
}

fn is_on(w: &World<'_>, conn: usize) -> bool {
    w.flow(conn, |f| f.state()) == Some(State::On)
}

/// R sends one segment, G takes it and shows a window; returns what R is shown.
fn exchange(r: &Peer<'_>, g: &Peer<'_>, from: i64, window: u32) -> u32 {
    r.sends(&format!("{from}:{}", from + 1000));
    g.takes_all();
    g.sends(&format!("ack {} win {window}", from + 1000));
    r.gets_last_any().window()
}

/// R sends super-segments up to `end`, G takes each at once.
fn carries(r: &Peer<'_>, g: &Peer<'_>, from: i64, end: i64, window: u32) -> u32 {
    let mut next = from;
    while next < end {
        let to = end.min(next + 60_000);
        r.sends(&format!("{next}:{to} gso 1000"));
        g.takes_all();
        g.sends(&format!("ack {to} win {window}"));
        next = to;
    }
    r.gets_last_any().window()
}

#[test]
fn snoop_39_a_flow_grows_by_what_fits_when_not_all_does() {
    let w = pages(256).opens();
    let (r1, g1) = w.connects();
    let (r2, g2) = w.connects();
    assert_eq!(exchange(&r1, &g1, 1, MIB), MIB);
    // 66 of 256 pages are taken, 64 are for first windows: of the rest as much stays spare as this
    // one gets.
    let shown = exchange(&r2, &g2, 1, MIB);
    assert!((900_000..MIB).contains(&shown), "{shown}");
    assert!(is_on(&w, 1));
    let own = w.flow(1, |f| u64::from(f.stats().reserved_pages)).expect("a flow");
    assert!(reserved(&w) + 64 + own <= 256, "{} and {own}", reserved(&w));
    // A third has its share too.
    let (r3, g3) = w.connects();
    let shown = exchange(&r3, &g3, 1, MIB);
    assert!((400_000..MIB).contains(&shown), "{shown}");
}

/// Found by simulation (seed 94962): R had filled a buffer while others had half of the budget.
/// When they had gone R had to ask for the window that was free.
#[test]
fn snoop_39_a_flow_that_r_has_filled_grows_when_others_have_given_back() {
    let w = pages(128).opens();
    let (r, g) = w.connects();
    let others = [w.connects(), w.connects()];
    exchange(&r, &g, 1, 64_000);
    for (r, g) in &others {
        exchange(r, g, 1, 600_000);
    }
    assert!(reserved(&w) >= 64, "{}", reserved(&w));
    g.stops(0);
    let mut next = 1001;
    while next == 1001 || r.gets_last_any().window() > 1000 {
        r.sends(&format!("{next}:{}", next + 1000));
        next += 1000;
    }
    others[0].1.sends("R. 1 ack 1001");
    assert!(reserved(&w) < 64, "{}", reserved(&w));
    g.sends("1:1001 ack 1001 win 64000");
    let shown = r.gets_last("1:1001").window();
    assert!(shown > 200_000, "{shown}");
}

#[test]
fn snoop_39_a_flow_that_stays_short_of_what_its_guest_shows_is_let_go_for_good() {
    let w = pages(256).opens();
    let (r1, g1) = w.connects();
    let (r2, g2) = w.connects();
    exchange(&r1, &g1, 1, MIB);
    let short = i64::from(exchange(&r2, &g2, 1, MIB));
    assert!(is_on(&w, 1), "as yet R has not used up one window");
    assert_eq!(carries(&r2, &g2, 1001, short + 60_000, MIB), MIB);
    assert_eq!(w.flow(1, |f| (f.state(), f.why())), Some((State::Pass, Why::NoBudget)));
    assert_eq!(w.flow(1, |f| f.stats().reserved_pages), Some(0));
    // It does not come back, whatever is free by now.
    w.after_ms(5000);
    assert_eq!(carries(&r2, &g2, short + 60_000, short + 200_000, 64_512), 64_512);
    assert_eq!(w.flow(1, |f| f.state()), Some(State::Pass));
    assert!(is_on(&w, 0), "the other one is as it was");
}

#[test]
fn snoop_39_a_window_that_the_host_can_never_show_is_shown_by_the_guest() {
    let setup = Setup { budget_bytes: 4_000_000, ..pages(256) };
    let (w, r, g) = setup.established();
    assert_eq!(exchange(&r, &g, 1, 6 * MIB), 6 * MIB);
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::NoBudget));
    assert_eq!(reserved(&w), 0);
    r.sends("1001:2001");
    g.gets("1001:2001");
    r.gets_nothing();
}

/// Three eighths of its VM's budget are the most that one flow gets.
#[test]
fn snoop_39_a_window_above_the_largest_share_of_the_budget_is_shown_by_the_guest() {
    for (window, state) in [(MIB + MIB / 4, State::On), (MIB + 3 * MIB / 4, State::Pass)] {
        let (w, r, g) = pages(256).established();
        exchange(&r, &g, 1, window);
        assert_eq!(w.state(), Some(state));
    }
}

/// Not while G has yet to take something: the edge would stand still until then.
#[test]
fn snoop_39_nobody_is_let_go_while_bytes_are_held_for_a_guest_off_its_cpu() {
    let setup = Setup { budget_bytes: 4_000_000, ..pages(256) };
    let (w, r, g) = setup.established();
    r.sends_all(&["1:1001", "1001:2001"]);
    g.takes_all();
    g.sends(&format!("ack 1001 win {}", 6 * MIB));
    assert_eq!(w.state(), Some(State::On));
    let shown = r.gets_last("ack 2001").window();
    assert!(shown > MIB, "what fits is shown at once: {shown}");
    g.sends(&format!("ack 2001 win {}", 6 * MIB));
    assert_eq!(r.gets_last("ack 2001").window(), 6 * MIB);
}

#[test]
fn snoop_39_a_guest_tuned_to_large_windows_is_followed() {
    let (w, r, g) = pages(4096).established();
    for window in [2 * MIB, 6 * MIB, 16 * MIB, 23 * MIB] {
        exchange(&r, &g, r.end(|end| end.next), window);
        let shown = exchange(&r, &g, r.end(|end| end.next), window);
        assert!((window - 1024..=window).contains(&shown), "{shown}"); // 1000 bytes may be held
    }
    assert_eq!(w.state(), Some(State::On));
    // And it is there to be used, beyond what any flow gets that nobody shows so much (SNOOP-39).
    g.stops(0);
    let mut next = r.end(|end| end.next);
    while flow(&w, |f| f.held_bytes()) < 2 * limits::FLOW_BUFFER_DOUBLED_MAX {
        r.sends(&format!("{next}:{} gso 1000", next + 60_000));
        next += 60_000;
        r.gets_last(&format!("ack {next}"));
    }
}

#[test]
fn inv_20_one_flow_leaves_the_others_of_its_vm_their_first_windows() {
    let w = pages(512).opens();
    let (r, g) = w.connects();
    exchange(&r, &g, 1, 3 * MIB);
    g.stops(0);
    let mut next = 1001;
    while r.end(|end| end.inbox.back().is_none_or(|seen| seen.window() > 0)) {
        r.sends(&format!("{next}:{} gso 1000", next + 60_000));
        next += 60_000;
    }
    let others = 512 / limits::BUDGET_FOR_FIRST_WINDOWS / pages_for(limits::FLOW_BUFFER_MIN);
    for n in 1..=usize::try_from(others).expect("few") {
        // Their guest takes nothing; what they have is theirs all the same.
        w.ring_takes(0, 3);
        let (r, _) = w.connects();
        w.ring_takes(0, 0);
        assert!(is_on(&w, n), "newcomer {n}");
        r.sends("1:50001 gso 1000");
        r.gets_last("ack 50001");
    }
}

#[test]
fn life_02_an_idle_flow_gives_its_reservation_back_and_takes_it_again() {
    let w = pages(4096).opens();
    let silent: Vec<_> = (0..16).map(|_| w.connects()).collect();
    for (r, g) in &silent {
        exchange(r, g, 1, 2 * MIB);
        carries(r, g, 1001, 200_001, 2 * MIB);
    }
    assert!(reserved(&w) > 1500, "{}", reserved(&w));
    w.after_ms(3000);
    assert_eq!(reserved(&w), 0);
    // So there is enough for as many newcomers.
    let newcomers: Vec<_> = (0..16).map(|_| w.connects()).collect();
    for (n, (r, g)) in newcomers.iter().enumerate() {
        assert_eq!(exchange(r, g, 1, 2 * MIB), 2 * MIB);
        assert!(is_on(&w, 16 + n));
    }
    w.after_ms(3000);
    // The shown edge still holds for all of it, with the guest off its CPU.
    let (r, g) = &silent[3];
    g.stops(0);
    r.sends("200001:200101");
    assert_eq!(r.gets_last("ack 200101").window(), 2 * MIB - 1024); // 100 bytes, in units
    for at in (200_101..2_240_101).step_by(60_000) {
        r.sends(&format!("{at}:{} gso 1000", at + 60_000));
        r.gets_last(&format!("ack {}", at + 60_000));
    }
    assert!(w.flow(3, |f| f.held_bytes()).expect("a flow") > 2_000_000);
}

/// Found in review: 255 of 512 pages stayed reserved for idle flows of a guest with jumbo frames,
/// whose window is the seven segments that fit into 64 KiB.
#[test]
fn inv_06_an_idle_flow_of_jumbo_segments_gives_its_place_back() {
    let window = [62_592; 2];
    let setup = Setup { mss: 8948, mtu: 9000, window, ..Setup::new() };
    for (shown, pages) in [(62_592, 0), (30_080, 17)] {
        let (w, r, g) = setup.established();
        r.sends("1:8949");
        g.takes_all();
        g.sends(&format!("ack 8949 win {shown}"));
        assert!(reserved(&w) > 0);
        w.after_ms(3000);
        assert_eq!(reserved(&w), pages, "{shown}");
    }
}

/// The edge shown to R stays: the guest's own data does not show less.
#[test]
fn inv_05_a_parked_flow_shows_the_edge_that_it_has_shown() {
    let (w, r, g) = Setup { scale: [Some(7), Some(10)], ..Setup::new() }.established();
    warms_up(&r, &g);
    let edge = flow(&w, |f| f.stats().edge_to_net);
    w.after_ms(3000);
    assert_eq!(flow(&w, |f| (f.stats().reserved_pages, f.is_parked())), (0, true));
    for at in [1, 1001, 2001] {
        g.sends(&format!("{at}:{} ack 1001", at + 1000));
        r.gets_last(&format!("{at}:{} ack 1001", at + 1000)); // the monitor watches the edge
        r.sends(&format!("1001 ack {}", at + 1000));
    }
    assert_eq!(flow(&w, |f| f.stats().edge_to_net), edge);
    assert!(flow(&w, |f| f.is_parked()), "only R's data needs a place");
}

/// A guest that shows less than R's next few segments would not take them itself.
#[test]
fn inv_06_a_flow_keeps_its_place_while_its_guest_has_no_room() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.takes_all();
    g.sends("ack 1001 win 2048");
    w.after_ms(10_000);
    assert!(reserved(&w) > 0);
    g.sends("ack 1001 win 32000");
    w.after_ms(3000);
    assert_eq!(reserved(&w), 0);
    r.takes_all();
    r.sends("1001:2001");
    r.gets_last("ack 2001");
}

/// A VM whose first flow is parked, and whose others hold all there is.
fn parked_without_budget() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let w = pages(20).opens();
    let (r, g) = w.connects();
    warms_up(&r, &g);
    w.after_ms(3000);
    assert!(flow(&w, |f| f.is_parked()));
    let others: Vec<_> = (1..=4).map(|_| w.connects()).collect();
    assert_eq!(reserved(&w), 20);
    for (r, _) in others {
        r.sends("1:1001");
    }
    (w, r, g)
}

#[test]
fn inv_06_a_parked_flow_without_budget_hands_its_data_through_until_there_is_some() {
    let (w, r, g) = parked_without_budget();
    r.sends("1001:2001 ack 1");
    g.gets("1001:2001 ack 1");
    r.gets_nothing(); // it is for G to acknowledge it
    r.sends("2001:3001 ack 1");
    g.gets("2001:3001 ack 1");
    r.sends("2001:3001 ack 1"); // lost inside G, for all R knows
    g.gets("2001:3001 ack 1");
    r.gets_nothing();
    g.sends("ack 3001");
    r.gets("1 ack 3001");
    assert_eq!(w.state(), Some(State::On));
    // The others are served: now there is a place, and R need not wait for G.
    for n in 1..=4 {
        let peer = Peer { world: w.clone(), conn: n, side: g.side };
        peer.takes_all();
        peer.sends("ack 1001");
    }
    w.after_ms(3000);
    g.stops(0);
    r.sends("3001:4001 ack 1");
    r.gets("1 ack 4001");
    assert_eq!(flow(&w, |f| f.held_bytes()), 1000);
}

#[test]
fn inv_06_a_gap_and_what_its_guest_has_no_room_for_wait_for_r_to_repeat_them() {
    let (w, r, g) = parked_without_budget();
    r.sends("2001:3001 ack 1");
    r.gets("1 ack 1001");
    g.gets_nothing();
    r.sends("1001:2001 ack 1");
    g.gets("1001:2001 ack 1");
    g.sends("ack 2001 win 512");
    r.gets("1 ack 2001");
    r.sends("2001:3001 ack 1");
    r.gets("1 ack 2001");
    g.gets_nothing();
    g.sends("ack 2001 win 32000");
    r.takes_all();
    r.sends("F. 2001:3001 ack 1");
    g.gets("F. 2001:3001 ack 1");
    r.gets_nothing();
    g.sends("1 ack 3002");
    r.gets("1 ack 3002");
    assert_eq!(w.state(), Some(State::On));
}

/// The same for a flow that is asked to leave: it does so once R has used up what it was shown.
#[test]
fn life_06_a_parked_flow_without_budget_drains() {
    let (w, r, g) = parked_without_budget();
    w.engine(|e, now| e.set_offload(now, GUEST, false));
    let edge = flow(&w, |f| f.stats().edge_to_net);
    let mut next = 1001;
    while w.state() != Some(State::Pass) {
        assert!(next < 300_000, "never");
        r.sends(&format!("{next}:{} ack 1", next + 1000));
        g.gets_last(&format!("{next}:{} ack 1", next + 1000));
        next += 1000;
        g.sends(&format!("ack {next}"));
        r.gets_last(&format!("1 ack {next}"));
    }
    assert!(flow(&w, |f| f.stats().edge_to_net) >= edge);
}

/// R's stream, and the numbers that both know.
struct Talk {
    r: Peer<'static>,
    g: Peer<'static>,
    acked: i64,
    got: i64,
}

impl Talk {
    /// R hears the ACKs that came and sends four segments from there on.
    fn r_speaks(&mut self, until: i64) {
        for seen in self.r.takes_all() {
            self.acked = self.acked.max(i64::from(seen.ack()));
        }
        for n in 0..4 {
            let at = self.acked + 1000 * n;
            if at < until {
                self.r.sends(&format!("{at}:{} ack 1", at + 1000));
            }
        }
    }

    /// G takes what is in order, and acknowledges that.
    fn g_answers(&mut self) {
        for seen in self.g.takes_all() {
            let (from, to) = seen.range();
            if i64::from(from) <= self.got {
                self.got = self.got.max(i64::from(to));
            }
        }
        self.g.sends(&format!("1 ack {}", self.got));
    }
}

#[test]
fn inv_06_when_all_idle_flows_wake_at_once_all_go_on_and_nothing_is_lost() {
    // Room for twelve of a hundred; most were shown more than a first window.
    const FLOWS: usize = 100;
    let w = pages(64).opens();
    let mut talks = Vec::new();
    for n in 0..FLOWS {
        let (r, g) = w.connects();
        assert!(is_on(&w, n), "newcomer {n}");
        warms_up(&r, &g);
        talks.push(Talk { r, g, acked: 1001, got: 1001 });
        if n % 5 == 4 {
            w.after_ms(3000); // five at a time, and idle then
        }
    }
    assert_eq!(reserved(&w), 0);
    // All at once, while the guest is off its CPU and while it is on it.
    for round in 0..8 {
        let until = 1001 + 4000 * (1 + round);
        w.ring_takes(0, if round % 2 == 0 { 100 } else { 100_000 });
        talks.iter_mut().for_each(|t| t.r_speaks(until));
        w.guest_runs(0);
        talks.iter_mut().for_each(Talk::g_answers);
    }
    let last = 1001 + 4000 * 8;
    for _ in 0..20 {
        talks.iter_mut().for_each(|t| t.r_speaks(last));
        talks.iter_mut().for_each(Talk::g_answers);
    }
    for (n, talk) in talks.iter().enumerate() {
        assert_eq!((talk.got, talk.acked), (last, last), "connection {n}");
        assert!(is_on(&w, n), "connection {n}");
    }
    // And all is as before once they are idle.
    w.after_ms(3000);
    assert_eq!(reserved(&w), 0);
}
