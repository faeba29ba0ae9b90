//! The control socket and the metrics, with clients that mean well and clients that do not.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nightporter_api::{Reply, Request};
use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_uid};

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host, LIMIT, NOBODY};

/// An address of loopback that was free a moment ago.
pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

pub(crate) fn host() -> (Dir, Host, SocketAddr) {
    let dir = Dir::new();
    let metrics = free_address();
    let ports = dir.vm("web1", "") + &dir.vm("web2", "");
    let config = dir.configure(&format!("metrics = \"{metrics}\""), &ports);
    let host = Host::start(&dir, &config);
    (dir, host, metrics)
}

pub(crate) fn http(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn line(stream: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    line
}

#[test]
fn requests_are_answered_in_order_however_they_are_cut() {
    let (_dir, host, _) = host();
    let mut stream = BufReader::new(host.connect());
    stream.get_mut().write_all(b"{\"cmd\":\"sta").unwrap();
    assert_eq!(host.port("web1").kind, "vm", "half a request holds up nobody");
    stream.get_mut().write_all(b"tus\"}\n{\"cmd\":\"flows\"}\n").unwrap();
    assert!(line(&mut stream).starts_with("{\"status\":{\"version\":"));
    assert_eq!(line(&mut stream), "{\"flows\":{\"flows\":[],\"next\":null}}\n");
}

#[test]
fn a_wrong_name_is_answered_with_the_right_ones() {
    let (_dir, host, _) = host();
    let Reply::Error { what, fix } = host.ask(&Request::Drain { vm: "web3".into() }) else {
        panic!("an error")
    };
    assert_eq!(what, "there is no VM \"web3\"");
    assert_eq!(fix, "use one of: web1, web2");
    let Reply::Error { what, .. } = host.ask(&Request::Flow { id: 7 }) else { panic!("an error") };
    assert_eq!(what, "there is no flow 7 (any more)");
}

#[test]
fn a_status_says_why_a_link_is_down_who_the_vmm_is_and_which_keys_are_in_force() {
    let dir = Dir::new();
    let config = dir
        .configure("metrics = \"off\"", &dir.vm("web1", "mac = \"02:00:00:00:00:01\"\nmtu = 9000"));
    let host = Host::start(&dir, &config);
    let port = host.port("web1");
    assert_eq!(port.trouble.as_deref(), Some("no VMM is connected to its socket"));
    assert_eq!(port.vm.unwrap().vmm_pid, None);
    let [mac, mtu, socket] = ["mac", "mtu", "socket"].map(|key| port.keys[key].as_str());
    assert_eq!((mac, mtu), ("\"02:00:00:00:00:01\"", "9000"));
    assert_eq!(socket, format!("\"{}\"", dir.join("web1").display()));
    let connected = UnixStream::connect(dir.join("web1")).unwrap();
    let why = "its VMM is connected, and the guest's network driver is not running";
    let port = host.until("web1", |port| port.trouble.as_deref() == Some(why));
    assert_eq!(port.vm.unwrap().vmm_pid, i32::try_from(std::process::id()).ok());
    drop(connected);
    let _guest = Guest::boot(&dir.join("web1"), PLAIN);
    let port = host.until("web1", |port| port.link);
    assert_eq!(port.trouble, None);
}

#[test]
fn nonsense_is_answered_and_a_line_without_end_is_cut_off() {
    let (_dir, host, _) = host();
    let mut stream = BufReader::new(host.connect());
    stream.get_mut().write_all(b"\x00\xff nonsense\n{\"cmd\":\"status\",\"x\":1}\n").unwrap();
    assert!(line(&mut stream).starts_with("{\"error\":{\"what\":\"not a request: "));
    assert!(line(&mut stream).contains("unknown field `x`"));
    // Until it is cut off: the daemon reads no further than it must.
    while stream.get_mut().write_all(&[b'x'; 4096]).is_ok() {}
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset),
    }
    assert!(host.port("web1").vm.is_some());
}

#[test]
fn clients_that_never_read_hold_up_nobody() {
    let (_dir, host, _) = host();
    let mut deaf = Vec::new();
    // More than there are places for; the idlest go.
    for _ in 0..40 {
        let mut stream = host.connect();
        stream.set_nonblocking(true).unwrap();
        // As much as the socket takes.
        while stream.write(b"{\"cmd\":\"status\"}\n").is_ok() {}
        deaf.push(stream);
        assert_eq!(host.status().ports.len(), 2);
    }
}

#[test]
fn a_capture_is_a_pcap_stream_of_what_crosses_the_port() {
    let (dir, host, _) = host();
    let mut guest = Guest::boot(&dir.join("web1"), PLAIN);
    let mut stream = BufReader::new(host.connect());
    stream.get_mut().write_all(b"{\"cmd\":\"capture\",\"port\":\"web1\"}\n").unwrap();
    assert_eq!(line(&mut stream), "{\"stream\":{}}\n");
    assert_eq!(host.port("web1").captures, 1);
    let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, 1]].concat();
    frame.extend([0x88, 0xb5]);
    frame.resize(60, 9);
    guest.send_plain(&frame);
    let mut pcap = PcapReader::new(stream).unwrap();
    let packet = pcap.next_packet().unwrap().unwrap();
    assert_eq!(&packet.data[..], frame);
    drop(pcap);
    host.until("web1", |p| p.captures == 0);
}

#[test]
fn a_monitor_is_told_of_a_vms_frames_at_both_sides_of_its_port() {
    let (dir, host, _) = host();
    let [mut web1, mut web2] = ["web1", "web2"].map(|vm| Guest::boot(&dir.join(vm), PLAIN));
    let mut stream = BufReader::new(host.connect());
    stream.get_mut().write_all(b"{\"cmd\":\"monitor\",\"vm\":\"web1\"}\n").unwrap();
    assert_eq!(line(&mut stream), "{\"stream\":{}}\n");
    assert_eq!(host.port("web1").captures, 1);
    let frame = |to: [u8; 6], from, len| {
        let mut frame = [&to[..], &[2, 0, 0, 0, 0, from], &[0x88, 0xb5]].concat();
        frame.resize(len, from);
        frame
    };
    let (of_web1, of_web2) = (frame([0xff; 6], 1, 1000), frame([2, 0, 0, 0, 0, 1], 2, 60));
    web1.offer(1);
    web2.offer(1);
    web1.send_plain(&of_web1);
    assert_eq!(web2.receive(1), std::slice::from_ref(&of_web1));
    web2.send_plain(&of_web2);
    assert_eq!(web1.receive(1), std::slice::from_ref(&of_web2));
    let mut reader = PcapNgReader::new(stream).unwrap();
    // The network's side is interface 0, and inbound is 1.
    for (interface, flags, frame) in
        [(1, 1, &of_web1), (0, 2, &of_web1), (0, 1, &of_web2), (1, 2, &of_web2)]
    {
        let it = loop {
            if let Block::EnhancedPacket(it) = reader.next_block().unwrap().unwrap() {
                break it.into_owned();
            }
        };
        assert_eq!(it.options, [EnhancedPacketOption::Flags(flags)], "{it:?}");
        assert_eq!((it.interface_id, it.original_len as usize), (interface, frame.len()));
        assert_eq!(&it.data[..], &frame[..frame.len().min(122)]);
    }
    drop(reader);
    host.until("web1", |p| p.captures == 0);
}

#[test]
fn the_metrics_name_every_port() {
    let (_dir, _host, address) = host();
    let answer = http(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n";
    assert!(answer.starts_with(head), "{answer}");
    for series in [
        "nightporter_frames_total{port=\"web1\",kind=\"vm\",direction=\"from_port\"} 0\n",
        "nightporter_bytes_total{port=\"web1\",kind=\"vm\",direction=\"to_port\"} 0\n",
        "nightporter_flows{port=\"web1\",state=\"on\"} 0\n",
        "nightporter_store_bytes{port=\"web1\",kind=\"held\"} 0\n",
        "nightporter_store_bytes{port=\"web1\",kind=\"budget\"} 4194304\n",
        "nightporter_early_acks_total{port=\"web1\"} 0\n",
        "nightporter_absorbed_acks_total{port=\"web1\"} 0\n",
        "nightporter_local_retransmissions_total{port=\"web1\"} 0\n",
        "nightporter_offload{port=\"web1\"} 1\n",
        "nightporter_congestion_offload{port=\"web1\"} 0\n",
        "nightporter_link_up{port=\"web2\",kind=\"vm\"} 0\n",
    ] {
        assert!(answer.contains(series), "{series} is not in\n{answer}");
    }
    assert!(!answer.contains("\nnightporter_drops_total{"), "none was dropped\n{answer}");
    for worker in ["frames", "sockets"] {
        let series = format!("\nnightporter_worker_cpu_seconds_total{{worker=\"{worker}\"}} ");
        let (_, value) = answer.split_once(&series).expect(&answer);
        assert!(!value.starts_with("0.0\n"), "{answer}");
    }
    // The same moment's numbers, to one who asks for the other format.
    let accept = "Accept: application/openmetrics-text; version=1.0.0";
    let open = http(address, &format!("GET /metrics HTTP/1.1\r\n{accept}\r\n\r\n"));
    assert!(
        open.contains("\r\nContent-Type: application/openmetrics-text; version=1.0.0;"),
        "{open}"
    );
    assert!(open.contains("# TYPE nightporter_frames counter\n") && open.ends_with("# EOF\n"));
}

#[test]
fn a_scrape_is_answered_although_many_connect_after_it_and_say_nothing() {
    let (_dir, _host, address) = host();
    for _ in 0..3 {
        let mut scraper = TcpStream::connect(address).unwrap();
        scraper.set_read_timeout(Some(LIMIT)).unwrap();
        let silent: Vec<_> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
        scraper.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        scraper.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        drop(silent);
    }
}

#[test]
fn http_that_is_not_a_scrape_gets_an_error_and_no_more() {
    let (_dir, host, address) = host();
    let first = |request: &str| http(address, request).lines().next().unwrap().to_string();
    assert_eq!(first("GET / HTTP/1.1\r\n\r\n"), "HTTP/1.1 404 Not Found");
    assert_eq!(first("POST /metrics HTTP/1.1\r\n\r\n"), "HTTP/1.1 405 Method Not Allowed");
    let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(8192));
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(&long.as_bytes()[..8192]).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    // Some who connect and say nothing.
    let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert_eq!(first("GET /metrics HTTP/1.0\r\n\r\n"), "HTTP/1.1 200 OK");
    drop(silent);
    assert!(host.port("web1").vm.is_some());
}

#[test]
#[ignore = "needs root: it is another user"]
fn a_member_of_the_status_group_may_look_and_change_nothing() {
    let dir = Dir::new();
    let daemon = "metrics = \"off\"\nstatus_group = \"daemon\""; // Debian's, of number 1
    let host = Host::start(&dir, &dir.configure(daemon, &dir.vm("web1", "")));
    let ask = |stream: UnixStream, request: &str| {
        let mut stream = BufReader::new(stream);
        stream.get_mut().write_all(format!("{{\"cmd\":{request}}}\n").as_bytes()).unwrap();
        line(&mut stream)
    };
    let looks = || {
        // This thread alone.
        set_thread_groups(&[Gid::from_raw(1)]).unwrap();
        let nobody = Uid::from_raw(NOBODY);
        set_thread_res_uid(nobody, nobody, nobody).unwrap();
        for request in ["status", "flows", "macs", "stations"] {
            let said = ask(host.connect(), &format!("\"{request}\""));
            assert!(said.starts_with(&format!("{{\"{request}\":")), "{said}");
        }
        for request in [
            "\"capture\",\"port\":\"web1\"",
            "\"monitor\",\"vm\":\"web1\"",
            "\"trace\",\"id\":0",
            "\"offload\",\"vm\":\"web1\",\"on\":false",
            "\"congestion_offload\",\"vm\":\"web1\",\"on\":true",
            "\"rate_limit\",\"vm\":\"web1\",\"direction\":\"to_guest\",\"mbit_s\":1",
            "\"drain\",\"vm\":\"web1\"",
            "\"change\",\"change\":{\"what\":\"remove_vm\",\"name\":\"web1\"}",
            "\"change\",\"change\":{\"what\":\"reload\"},\"dry_run\":true",
        ] {
            let said = ask(host.connect(), request);
            assert!(said.contains("may look at states, and nothing else"), "{request}: {said}");
        }
        // Requests of all members have a rate: 100 at once, and then 50 a second.
        let (mut stream, begun) = (BufReader::new(host.connect()), Instant::now());
        for _ in 0..125 {
            stream.get_mut().write_all(b"{\"cmd\":\"macs\"}\n").unwrap();
            assert!(line(&mut stream).starts_with("{\"macs\":"));
        }
        assert!(begun.elapsed() >= Duration::from_millis(400), "{:?}", begun.elapsed());
        (0..40).map(|_| host.connect()).collect::<Vec<_>>()
    };
    let operator = host.connect();
    let lookers = std::thread::scope(|threads| threads.spawn(looks).join().unwrap());
    // Many of them leave room for an operator.
    let on = "\"offload\",\"vm\":\"web1\",\"on\":true";
    assert_eq!(ask(operator, on), "{\"done\":{}}\n");
    assert_eq!(lookers.len(), 40);
}
