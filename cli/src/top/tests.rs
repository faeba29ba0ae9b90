use std::collections::BTreeMap;

use nightporter_api::{FlowInfo, Histogram, PortStatus, Status, VmStatus};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;

fn vm(name: &str, link: bool, early: u64, saved: u64, received: u64) -> PortStatus {
    let vm = VmStatus {
        offload: true,
        flows: BTreeMap::from([("on".into(), 3), ("closed".into(), 9)]),
        held_bytes: early / 2,
        counters: BTreeMap::from([("early_acked_bytes".into(), early)]),
        ack_saved: Histogram { buckets: vec![(1 << 24, 7), (1 << 25, saved)], above: 0, sum_ns: 0 },
        ..VmStatus::default()
    };
    PortStatus {
        name: name.into(),
        kind: "vm".into(),
        link,
        bytes_to_port: received,
        vm: Some(vm),
        ..PortStatus::default()
    }
}

fn looks() -> Looks {
    let begun = Instant::now();
    let status = |cpu_us, ports: Vec<PortStatus>| Status {
        version: "1.2.3".into(),
        worker_cpu_us: cpu_us,
        ports,
        ..Status::default()
    };
    let lan = PortStatus { name: "lan".into(), kind: "tap".into(), ..PortStatus::default() };
    let mut looks = Looks::default();
    let before = vec![lan.clone(), vm("web1", true, 0, 0, 0), vm("web2", false, 0, 0, 0)];
    looks.take(begun, status(0, before), vec![]);
    let now = vec![lan, vm("web1", true, 4096, 100, 2_000_000), vm("web2", false, 8192, 0, 0)];
    let flow = |id, vm: &str, held_bytes| FlowInfo {
        id,
        vm: vm.into(),
        guest: "10.0.0.2:80".into(),
        remote: "[2001:db8:0:1:2:3:4:5]:40001".into(),
        state: "on".into(),
        held_bytes,
        ..FlowInfo::default()
    };
    let ended = FlowInfo { state: "closed".into(), ..flow(9, "web1", 0) };
    let flows = vec![flow(7, "web1", 10), flow(8, "web2", 99), ended];
    looks.take(begun + Duration::from_secs(2), status(500_000, now), flows);
    looks
}

fn drawn(top: &mut Top, looks: &Looks) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(80, 8)).unwrap();
    top.show(looks);
    terminal.draw(|frame| top.draw(frame)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| (0..80).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..8).map(|y| line(y).trim_end().to_owned()).collect()
}

fn press(top: &mut Top, code: KeyCode) -> bool {
    top.handle_key(KeyEvent::new(code, KeyModifiers::NONE))
}

#[test]
fn vms_have_rates_and_what_was_saved_since_the_last_look_in_80_columns() {
    let (mut top, looks) = (Top::default(), looks());
    assert_eq!(
        drawn(&mut top, &looks)[..4],
        [
            "nightporterd 1.2.3: 2 VMs, 6 connections, 25 % of a core",
            "VM               LINK OFFLOAD   FLOWS  HELD SENT/s RECV/s EARLY/s  SAVED    p99",
            "web1             up   on            3  2.0K      0   8.0M    2.0k  25 ms  33 ms",
            "web2             down on            3  4.0K      0      0    4.1k      -      -",
        ]
    );
    assert_eq!(VM_COLUMNS.iter().map(|it| it.width + 1).sum::<u16>(), 80);
    assert!(FLOW_COLUMNS.iter().map(|it| it.width + 1).sum::<u16>() <= 80);
}

#[test]
fn keys_sort_select_and_lead_to_connections_and_back() {
    let (mut top, looks) = (Top::default(), looks());
    drawn(&mut top, &looks);
    (0..4).for_each(|_| assert!(!press(&mut top, KeyCode::Char('>'))));
    assert!(drawn(&mut top, &looks)[2].starts_with("web2 "), "by bytes held");
    press(&mut top, KeyCode::Char('I'));
    assert!(drawn(&mut top, &looks)[2].starts_with("web1 "), "inverted");
    press(&mut top, KeyCode::End);
    assert!(press(&mut top, KeyCode::Enter), "it has to be fetched");
    assert_eq!((top.vm.as_deref(), top.selected), (Some("web2"), 0));
    let flows = drawn(&mut top, &looks);
    assert_eq!(
        flows[1..4],
        [
            "   ID VM        GUEST                   REMOTE               STATE  HELD  EARLY",
            "    7 web1      10.0.0.2:80          <- [2001:db8:0:1:2:3:4~ on       10      0",
            "    8 web2      10.0.0.2:80          <- [2001:db8:0:1:2:3:4~ on       99      0",
        ]
    );
    for _ in 0..6 {
        press(&mut top, KeyCode::Char('>'));
    }
    assert!(drawn(&mut top, &looks)[2].starts_with("    8 web2"), "by bytes held");
    assert!(press(&mut top, KeyCode::Esc));
    assert!(!top.shows_flows && top.vm.is_none());
    press(&mut top, KeyCode::F(1));
    assert!(drawn(&mut top, &looks)[1].starts_with("Up, Down"));
    press(&mut top, KeyCode::Char('q'));
    assert!(!top.quits && !top.shows_help, "any key leaves the help");
    press(&mut top, KeyCode::Char('Z'));
    assert!(drawn(&mut top, &looks)[7].starts_with("paused"));
    top.handle_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert!(top.quits);
}
