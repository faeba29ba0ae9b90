use crate::common::segment::pattern_bytes;
use crate::common::setup::Setup;
use crate::common::world::{Peer, Side, World};
use crate::engine::Verdict;

/// A connection of a VM for which H sends.
fn established(setup: &Setup) -> (World<'static>, Peer<'static>, Peer<'static>) {
    Setup { floods: true, ..setup.clone() }.established()
}

/// The bytes of G that are kept, and what the VM's account and the arena have to do with them.
fn kept(w: &World<'_>, from: i64, to: i64) -> Vec<u8> {
    let port = w.guest_port();
    w.engine(|e, _| {
        let (_, _, flow) = e.flows().next().expect("a flow");
        let stats = flow.stats();
        let inbound = stats.reserved_pages - stats.kept_pages;
        let vm = e.vm(port).expect("a VM");
        assert_eq!(vm.reserved_pages, u64::from(inbound + stats.kept_pages));
        let Some(relayed) = flow.losses.relayed() else { return vec![] };
        assert_eq!(relayed.reserved_pages(), stats.kept_pages);
        let held = flow.store().held_pages() + relayed.store().held_pages();
        assert_eq!(e.arena().free_pages() + held as usize, e.arena().pages_total());
        let first = flow.stats().net_una; // relative to this, for G's ISN is the setup's
        let at = |n: i64| first.wrapping_add_signed(n - from);
        relayed.store().slices(e.arena(), at(from), at(to)).flatten().copied().collect()
    })
}

fn kept_pages(w: &World<'_>) -> u32 {
    w.flow(0, |f| f.stats().kept_pages).unwrap_or(0)
}

#[test]
fn flood_03_what_the_guest_sends_is_kept_until_r_has_acknowledged_it() {
    let (w, r, g) = established(&Setup::new());
    assert_eq!(kept_pages(&w), 0, "it has sent nothing");
    g.sends_all(&["1:1001", "1001:2001"]);
    r.gets("1:2001");
    assert_eq!(kept(&w, 1, 2001), pattern_bytes(Side::G as u32, 1, 2000));
    r.sends("ack 1501");
    g.gets("ack 1501");
    assert_eq!(kept(&w, 1501, 2001), pattern_bytes(Side::G as u32, 1501, 500));
    g.sends("2001:3001");
    r.gets("2001:3001");
    assert_eq!(kept(&w, 1501, 3001), pattern_bytes(Side::G as u32, 1501, 1500));
    r.sends("ack 3001");
    g.gets("ack 3001");
    w.after_ms(3000);
    assert_eq!(kept_pages(&w), 0, "idle");
}

#[test]
fn the_first_copy_of_a_byte_is_kept_and_new_bytes_behind_it() {
    let (w, r, g) = established(&Setup::new());
    g.sends("1:1001");
    g.sends("501:1501 fill 7");
    r.takes_all();
    let expected = [pattern_bytes(Side::G as u32, 1, 1000), vec![b'7'; 500]].concat();
    assert_eq!(kept(&w, 1, 1501), expected);
}

#[test]
fn bytes_that_were_under_way_before_are_not_taken_over() {
    let (w, r, g) = Setup::new().established();
    g.sends("1:1001");
    let port = w.guest_port();
    w.engine(|e, _| e.set_congestion_offload(port, true));
    g.sends("1001:2001");
    r.takes_all();
    assert_eq!(kept_pages(&w), 0);
    r.sends("ack 2001");
    g.takes_all();
    g.sends("2001:3001");
    r.gets("2001:3001");
    assert_eq!(kept(&w, 2001, 3001), pattern_bytes(Side::G as u32, 2001, 1000));
}

#[test]
fn inv_06_without_a_place_for_a_first_window_h_does_not_take_over() {
    // The budget has room for R's first window, and a page or two.
    let (w, r, g) = established(&Setup { budget_bytes: 7 << 14, ..Setup::new() });
    assert!(matches!(g.sends("1:1001"), Verdict::Forward(_)));
    r.gets_all(&["1:1001"]);
    assert_eq!(kept_pages(&w), 0);
}

#[test]
fn everything_goes_back_however_a_connection_ends() {
    type End = fn(&World<'static>, &Peer<'static>, &Peer<'static>);
    let ends: [(&str, End); 5] = [
        ("RST of R", |_, r, _| {
            r.sends("R 1");
        }),
        ("RST of G", |_, _, g| {
            g.sends("R. 1001 ack 1");
        }),
        ("the VM hangs up", |w, _, _| {
            let port = w.guest_port();
            w.engine(|e, now| e.handle_guest_gone(now, port));
            w.after_ms(2000);
        }),
        ("the VM goes", |w, _, _| {
            let port = w.guest_port();
            w.engine(|e, now| e.remove_port(now, port));
        }),
        ("R acknowledges, and time", |w, r, _| {
            r.sends("ack 1001");
            w.after_ms(3000);
        }),
    ];
    for (how, end) in ends {
        let (w, r, g) = established(&Setup::new());
        g.sends("1:1001");
        r.takes_all();
        assert_eq!(kept_pages(&w), 5, "{how}: the window that G was shown");
        end(&w, &r, &g);
        let free = w.engine(|e, _| (e.arena().free_pages(), e.arena().pages_total()));
        assert_eq!(free.0, free.1, "{how}");
        assert_eq!(kept_pages(&w), 0, "{how}");
        let port = w.guest_port();
        let account = |w: &World<'_>| {
            w.engine(|e, _| e.vm(port).map_or((0, 0), |vm| (vm.reserved_pages, vm.lent_pages)))
        };
        assert_eq!(account(&w), (0, 0), "{how}: what others of the VM may take");
    }
}
