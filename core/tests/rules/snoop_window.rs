//! SNOOP-33 to SNOOP-43: windows and probes toward R, and who answers for G.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, sends_segments, warms_up};
use nightporter_core::limits;
use nightporter_core::tcp::flow::{Flow, State, Why};

/// R sends all that H's window takes; returns where it ends.
fn fills_window(r: &Peer<'_>, from: i64) -> i64 {
    let mut next = from;
    let mut room = 1000;
    while room > 0 {
        let end = next + i64::from(room.min(60_000));
        let gso = if end - next > 1000 { " gso 1000" } else { "" };
        r.sends(&format!("{next}:{end}{gso}"));
        next = end;
        room = r.gets_last_any().window();
    }
    next
}

/// The same with an ACK for each segment; something less than a window field's unit is left.
fn fills_window_by_segments(w: &World<'_>, r: &Peer<'_>, g: &Peer<'_>) -> i64 {
    warms_up(r, g);
    g.stops(1);
    let mut end = 1001;
    while end == 1001 || r.gets_last_any().window() > 0 {
        r.sends(&format!("{end}:{}", end + 1000));
        end += 1000;
    }
    assert!(flow(w, |f| f.stats().edge_to_net > f.stats().rcv_nxt));
    end
}

fn coarse() -> Setup {
    Setup { scale: [Some(7), Some(14)], window: [64_000, 49_152], ..Setup::new() }
}

#[test]
fn snoop_33_a_full_buffer_closes_the_window_and_stays_on() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(1);
    let end = fills_window(&r, 1001);
    assert!(end > 200_000, "{end}");
    for _ in 0..12 {
        w.after_ms(5000);
        r.sends(&format!("{}", end - 1));
    }
    assert!(r.takes_all().iter().all(|a| (i64::from(a.ack()), a.window()) == (end, 0)));
    assert_eq!(w.state(), Some(State::On));
    assert_eq!(flow(&w, |f| f.held_bytes()) as i64, end - 1001);
    let drops = w.0.borrow().engine.drops(GUEST).expect("a port").iter().sum::<u64>();
    assert_eq!(drops, 0, "all that was promised was taken");
}

#[test]
fn snoop_34_the_reopened_window_is_said_twice() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    w.after_ms(1000);
    g.stops(1);
    let end = fills_window(&r, 1001);
    g.runs();
    let acked = i64::from(g.gets_last_any().range().1);
    r.takes_all();
    g.sends(&format!("ack {acked}"));
    let update = r.gets(&format!("ack {end}"));
    assert!(update.window() >= 1000);
    w.after_ms(limits::WINDOW_UPDATE_REPEAT.as_millis() + 1);
    assert_eq!(r.gets(&format!("ack {end}")).window(), update.window());
    w.after_ms(10_000);
    r.gets_nothing();
}

#[test]
fn snoop_34_who_drains_says_the_reopened_window_once() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(1);
    let end = fills_window(&r, 1001);
    g.runs();
    let acked = i64::from(g.gets_last_any().range().1);
    r.takes_all();
    g.sends(&format!("ack {acked}"));
    r.gets(&format!("ack {end}"));
    w.engine(|engine, now| engine.drain(now, GUEST));
    w.after_ms(limits::WINDOW_UPDATE_REPEAT.as_millis() + 1);
    assert_eq!(w.state(), Some(State::Drain));
    r.gets_nothing();
}

/// Found by simulation (seed 2768): the window opened in a segment that R answers without a look at
/// its window, and R's answer was taken for news of it.
#[test]
fn snoop_34_what_r_does_not_read_shows_no_window() {
    for said in ["100", "1:101"] {
        let (w, r, g) = Setup::new().established();
        warms_up(&r, &g);
        g.sends("1:101 ack 1001");
        r.gets("1:101 ack 1001");
        r.sends("1001 ack 101");
        g.gets("1001 ack 101");
        g.stops(1);
        let end = fills_window(&r, 1001);
        g.runs();
        let acked = i64::from(g.gets_last_any().range().1);
        r.takes_all();
        // A keepalive or window probe of G; or what it repeats although R has acknowledged it.
        g.sends(&format!("{said} ack {acked}"));
        assert_eq!(r.gets(&format!("{said} ack {end}")).window(), 0);
        let update = r.gets(&format!("101 ack {end}"));
        assert!(update.window() >= 1000);
        r.sends(&format!("{end} ack 101"));
        w.after_ms(limits::WINDOW_UPDATE_REPEAT.as_millis() + 1);
        assert_eq!(r.gets(&format!("101 ack {end}")).window(), update.window());
    }
}

/// Found by simulation: what was left of a window of less than a unit hid the unit that G had made
/// room for, and R had to ask.
#[test]
fn snoop_34_a_coarse_unit_is_shown_as_soon_as_there_is_room_for_it() {
    let (w, r, g) = coarse().established();
    let end = fills_window_by_segments(&w, &r, &g);
    g.runs();
    g.takes_all();
    r.takes_all();
    let unit = 1 << 14;
    // The reservation covers the buffer and one unit more, for rounding up.
    let room = |f: &Flow| {
        f.stats().guest_una + u64::from(f.stats().buffer_bytes) + unit - f.stats().rcv_nxt
    };
    let mut acked = 1001;
    while flow(&w, room) < unit {
        r.gets_nothing();
        acked += 500;
        g.sends(&format!("ack {acked}"));
    }
    assert!(acked < end);
    assert_eq!(r.gets_last(&format!("ack {end}")).window(), 1 << 14);
}

#[test]
fn snoop_34_a_window_that_is_shut_to_the_byte_is_not_said_again_before_it_opens() {
    let (w, r, g) = coarse().established();
    warms_up(&r, &g);
    g.stops(1);
    let end = fills_window(&r, 1001);
    // The rest of the buffer, which no field can show.
    let rest = flow(&w, |f| f.stats().edge_to_net - f.stats().rcv_nxt);
    r.sends(&format!("{end}:{}", end + i64::try_from(rest).expect("small")));
    let shut = |f: &Flow| f.stats().edge_to_net == f.stats().rcv_nxt;
    assert!(flow(&w, shut));
    g.runs();
    g.takes_all();
    r.takes_all();
    let mut acked = 1001;
    while flow(&w, shut) {
        r.gets_nothing();
        acked += 500;
        g.sends(&format!("ack {acked}"));
    }
}

#[test]
fn snoop_34_no_update_for_a_remote_that_has_sent_its_reset() {
    let (w, r, g) = coarse().established();
    let end = fills_window_by_segments(&w, &r, &g);
    r.sends(&format!("R {end}"));
    r.takes_all();
    g.runs();
    g.takes_all();
    for acked in (1501..end).step_by(500) {
        g.sends(&format!("ack {acked}"));
        r.gets_nothing();
    }
}

/// A window that was shown holds, whoever is silent (RFC 7323 section 2.4).
#[test]
fn snoop_35_data_in_a_window_that_was_shown_is_taken_for_a_silent_guest() {
    let (w, r, g) = coarse().established();
    warms_up(&r, &g);
    g.stops(1);
    r.sends("1001:2001");
    w.after_ms(61_000);
    let mut end = 2001;
    while flow(&w, |f| f.stats().edge_to_net - f.stats().rcv_nxt) >= (1 << 14) + 1000 {
        r.sends(&format!("{end}:{}", end + 1000));
        end += 1000;
    }
    assert_eq!(r.gets_last_any().window(), 1 << 14);
    let rest: Vec<String> =
        (0..8).map(|n| end + 1000 * n).map(|at| format!("{at}:{}", at + 1000)).collect();
    r.sends_all(&rest.iter().map(String::as_str).collect::<Vec<_>>());
    r.gets_last(&format!("ack {}", end + 8000));
}

/// Found by simulation: octets of probes were taken, and so acknowledged, for a guest that had been
/// silent for a minute, until the unit was full.
#[test]
fn snoop_35_a_probe_within_a_unit_is_not_taken_for_a_silent_guest() {
    let (w, r, g) = coarse().established();
    let end = fills_window_by_segments(&w, &r, &g);
    w.after_ms(50_000);
    r.sends(&format!("{end}:{}", end + 1));
    r.gets_last(&format!("ack {} win 0", end + 1));
    w.after_ms(15_000);
    r.sends(&format!("{}:{}", end + 1, end + 2));
    r.gets_nothing();
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn snoop_34_no_update_for_crumbs() {
    let (_, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(1);
    fills_window(&r, 1001);
    g.runs();
    g.takes_all();
    r.takes_all();
    for n in 1..9_i64 {
        g.sends(&format!("ack {}", 1001 + 100 * n));
    }
    r.gets_nothing();
    g.sends("ack 2129");
    assert_eq!(r.takes_all().len(), 1);
}

/// Found by tshark: G's ACKs moved the edge by less than a unit, and each made H say again what R
/// knew. Three of those are a loss to R (RFC 5681 section 3.2).
#[test]
fn snoop_34_an_update_that_a_coarse_unit_cannot_say_is_no_duplicate_ack() {
    let (w, r, g) = coarse().established();
    let end = fills_window_by_segments(&w, &r, &g);
    g.runs();
    g.takes_all();
    r.takes_all();
    let mut shown = 0;
    for acked in (3001..end).step_by(2000) {
        g.sends(&format!("ack {acked}"));
        g.takes_all();
        for update in r.takes_all() {
            assert!(update.window() > shown, "R was shown {shown} bytes before");
            shown = update.window();
        }
    }
    assert!(shown >= 1 << 15, "{shown}");
}

#[test]
fn snoop_34_an_update_when_half_of_the_window_is_used_up() {
    let (_, r, g) = Setup::new().established();
    warms_up(&r, &g);
    r.sends("1001:41001 gso 1000");
    g.takes_all();
    r.takes_all();
    g.sends("ack 21001");
    r.gets_nothing();
    for n in 1..4 {
        r.sends(&format!("{}:{} gso 1000", 1001 + 40_000 * n, 41_001 + 40_000 * n));
    }
    g.takes_all();
    r.takes_all();
    g.sends("ack 41001");
    assert_eq!(r.takes_all().len(), 1);
}

#[test]
fn snoop_35_every_probe_is_answered_at_once() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(1);
    let end = fills_window(&r, 1001);
    let edge = flow(&w, |f| f.stats().edge_to_net - f.stats().guest_una) as i64 + 1001;
    for n in 0..10 {
        let probe =
            if n % 2 == 0 { format!("{}", end - 1) } else { format!("{edge}:{}", edge + 1) };
        r.sends(&probe);
        r.gets(&format!("ack {end} win 0"));
        w.after_ms(100);
    }
    assert_eq!(flow(&w, |f| f.stats().rcv_nxt - f.stats().guest_una) as i64, end - 1001);
}

#[test]
fn snoop_36_a_stopped_guest_is_found_out() {
    // R's keepalive, five times a second apart, once the connection was idle.
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    w.after_ms(60_000);
    r.takes_all();
    g.stops(100);
    for _ in 0..5 {
        r.sends("1000");
        w.after_ms(1000);
    }
    r.gets_nothing();
    // With bytes held H answers, but only for T_alive.
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(100);
    r.sends("1001:2001");
    let mut answered = 0;
    for _ in 0..30 {
        w.after_ms(1000);
        r.takes_all();
        r.sends("2000");
        answered += r.takes_all().len();
    }
    assert!((9..=10).contains(&answered), "{answered}");
}

/// Found by simulation (seed 43908): R's answers were older than the octets by which it probed the
/// window, and H had taken those. G gave R up.
#[test]
fn snoop_36_the_answer_to_a_keepalive_of_g_may_be_older_than_what_h_has_taken() {
    for octets in [1_i64, 2] {
        let (_, r, g) = Setup::new().small().established();
        warms_up(&r, &g);
        g.sends("ack 1001 win 0");
        r.sends(&format!("1001:{}", 1001 + octets));
        r.takes_all();
        g.takes_all();
        g.sends("0 ack 1001 win 0");
        r.gets(&format!("0 ack {}", 1001 + octets));
        r.sends("1001 ack 1");
        g.gets("1001 ack 1");
        r.sends("1001 ack 1");
        g.gets_nothing(); // it has asked once
    }
}

#[test]
fn snoop_36_a_keepalive_carries_nothing_stale_to_the_guest() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.sends("1:2001 ack 1001 gso 1000");
    r.sends("1001 ack 2001 win 32000");
    g.gets("ack 2001 win 32000");
    w.after_ms(1000);
    // Delayed in the network: an older ack and window, an older clock.
    r.sends("1000 ack 1001 win 64000 <ts 100>");
    let seen = g.gets_last_any();
    assert_eq!((seen.range(), seen.ack(), seen.window()), ((1000, 1000), 2001, 32_000));
    // Found by simulation (seed 4834): its blocks, below the newer ACK, were DSACKs to G.
    r.sends("1000 ack 1001 <sack 1501:2001>");
    let seen = g.gets_last_any();
    assert_eq!((seen.range(), seen.ack(), seen.sack().len()), ((1000, 1000), 2001, 0));
    // And one that acknowledges what G never sent goes nowhere.
    r.is_forged("1000 ack 9001");
    g.gets_nothing();
}

/// Found by simulation: it was taken for data, and H answered for a guest that was long gone.
#[test]
fn snoop_36_a_keepalive_with_an_octet_behind_a_delivered_fin_is_for_the_guest_to_answer() {
    let (_, r, g) = Setup::new().established();
    warms_up(&r, &g);
    r.sends("F. 1001:1001 ack 1");
    g.gets("F. 1001:1001 ack 1");
    g.sends("ack 1002");
    r.gets_last("1 ack 1002");
    g.takes_all();
    for keepalive in ["1001:1002 ack 1", "1001 ack 1"] {
        r.sends(keepalive);
        r.gets_nothing();
        g.gets(keepalive);
    }
}

/// Found by simulation (seeds 86437, 108167): R's window ends below its FIN, so that is where its
/// ACKs lie. H took them for keepalives, and G got neither an answer to its own, nor an ACK.
#[test]
fn snoop_36_what_r_says_from_below_a_fin_that_h_holds_is_no_keepalive() {
    let (_, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.sends("1:1001 ack 1001");
    r.sends("F. 1001:2001 ack 1");
    g.takes_all(); // and G does not answer
    r.takes_all();
    r.sends("2001 ack 1001");
    g.gets_last("ack 1001");
    g.sends("1000 ack 1001");
    r.gets_last("1000 ack 2001");
    r.sends("2001 ack 1001");
    g.gets_last("ack 1001");
}

#[test]
fn snoop_37_a_lost_ack_makes_no_second_delivery() {
    let (_, r, g) = Setup::new().established();
    warms_up(&r, &g);
    sends_segments(&r, 1001, 3);
    r.takes_all(); // which the network loses
    g.takes_all();
    r.sends("1001:2001");
    r.gets("ack 4001 <sack 1001:2001>");
    r.sends("2001:3001");
    r.gets("ack 4001 <sack 2001:3001>");
    g.gets_nothing();
}

#[test]
fn snoop_39_the_buffer_grows_with_what_the_guest_drains() {
    let (w, r, g) = Setup { budget_bytes: 16 << 20, ..Setup::new() }.established();
    warms_up(&r, &g);
    let mut next = 1001;
    let mut sizes = vec![flow(&w, |f| f.stats().buffer_bytes)];
    for _ in 0..6 {
        g.stops(1);
        next = fills_window(&r, next);
        g.runs();
        while i64::from(flow(&w, |f| f.held_bytes()) as u32) > 0 {
            let acked = g.gets_last_any().range().1;
            g.sends(&format!("ack {acked}"));
        }
        r.takes_all();
        sizes.push(flow(&w, |f| f.stats().buffer_bytes));
    }
    assert!(sizes.windows(2).all(|w| w[1] >= w[0]), "{sizes:?}");
    assert!(u64::from(sizes[6]) > 3 << 20, "{sizes:?}");
    assert!(u64::from(sizes[6]) <= limits::FLOW_BUFFER_MAX, "{sizes:?}");
    let vm = w.engine(|e, _| e.vm(GUEST).map(|vm| vm.reserved_pages)).expect("a VM");
    assert!(vm <= 257, "{vm} pages");
}

/// R sends segments of 1000 bytes from byte 1001 on, as far as it may; what H acknowledged.
fn sends_as_far_as_it_may(r: &Peer<'_>) -> u32 {
    let mut next = 1001;
    loop {
        r.sends(&format!("{next}:{}", next + 1000));
        let seen = r.gets_last(&format!("ack {}", next + 1000));
        if seen.window() < 1000 {
            return seen.ack();
        }
        next += 1000;
    }
}

#[test]
fn snoop_39_r_need_not_wait_for_the_next_slice_of_a_guest_that_has_answered() {
    let (_, r, g) = Setup { budget_bytes: 16 << 20, ..Setup::new() }.established();
    warms_up(&r, &g);
    g.stops(0);
    let acked = sends_as_far_as_it_may(&r);
    assert!((1_000_000..=1_000_000 + 50_000).contains(&acked), "{acked}");
}

/// Found by simulation (seeds 45250, 85072): what was left of a unit of 16 KiB R could not see, and
/// the window grew only when R's probes had filled it.
#[test]
fn snoop_39_a_rest_that_the_field_cannot_show_fills_the_buffer_too() {
    let scale = [Some(7), Some(14)];
    let setup = Setup { budget_bytes: 16 << 20, scale, ..Setup::new() };
    let (_, r, g) = setup.established();
    warms_up(&r, &g);
    g.stops(0);
    let acked = sends_as_far_as_it_may(&r);
    assert!(acked > 900_000, "{acked}");
}

#[test]
fn snoop_39_a_guest_whose_application_does_not_read_is_not_run_ahead_of() {
    let (_, r, g) = Setup { budget_bytes: 16 << 20, ..Setup::new() }.established();
    warms_up(&r, &g);
    g.sends("ack 1001 win 0");
    r.takes_all();
    let acked = sends_as_far_as_it_may(&r);
    assert!((200_000..=270_000).contains(&acked), "{acked}");
}

#[test]
fn snoop_39_no_more_is_promised_than_the_budget_has() {
    // Three flows and room for little more than the first windows (INV-06, LIFE-03).
    let setup = Setup { budget_bytes: 640 * 1024, ..Setup::new() };
    let w = setup.opens();
    let pairs: Vec<_> = (0..4).map(|_| w.connects()).collect();
    let on = pairs.iter().enumerate().filter(|(n, _)| w.flow(*n, |f| f.state()) == Some(State::On));
    assert!(on.count() >= 2);
    for ring in [1, 0] {
        w.ring_takes(0, ring);
    }
    for (n, (r, _)) in pairs.iter().enumerate() {
        if w.flow(n, |f| f.state()) == Some(State::On) {
            fills_window(r, 1);
        }
    }
    let used = w.engine(|e, _| e.arena().pages_total() - e.arena().free_pages());
    assert!(used <= 640 / 16, "{used} pages of 40");
}

#[test]
fn snoop_40_a_wakened_guest_is_fed_as_it_acknowledges() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(1);
    let end = fills_window(&r, 1001);
    g.runs();
    // All within the same instant: no timer is needed.
    let mut rounds = 0;
    while flow(&w, |f| f.held_bytes()) > 0 {
        let acked = g.gets_last_any().range().1;
        g.sends(&format!("ack {acked}"));
        rounds += 1;
    }
    assert!(rounds <= end / 32_000, "{rounds}");
    assert_eq!(w.now(), Setup::new().start);
}

#[test]
fn snoop_42_a_guest_that_answers_by_another_path() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    r.takes_all();
    w.after_ms(6000);
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Drain, Why::Asymmetric));
    assert!(!g.takes_all().is_empty());
    let edge = flow(&w, |f| f.stats().edge_to_net);
    r.sends("1001:2001");
    let unit = 128; // of rounding, which keeps what R sees from moving left
    assert!(flow(&w, |f| f.stats().edge_to_net) < edge + unit, "no new promise");
}

#[test]
fn snoop_44_acks_that_the_network_loses_are_made_good() {
    // R hears one ACK in two, and sends again what it has not heard of.
    let (_, r, g) = Setup::new().established();
    warms_up(&r, &g);
    let mut acked = 1001_i64;
    let mut lost = false;
    let mut sent = 0;
    while acked < 101_001 {
        r.sends(&format!("{acked}:{}", acked + 1000));
        sent += 1;
        for ack in r.takes_all() {
            lost = !lost;
            if !lost {
                acked = acked.max(i64::from(ack.ack()));
            }
        }
        let end = g.takes_all().last().map(|s| s.range().1);
        if let Some(end) = end {
            g.sends(&format!("ack {end}"));
        }
    }
    assert!(sent < 400, "{sent}");
}
