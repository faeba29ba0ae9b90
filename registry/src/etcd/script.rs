//! Tests against a scripted member: answers that etcd seldom gives, and entries that no daemon
//! writes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::event::{Timespec, poll};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use super::schema::Key;
use super::tests::{LIMIT, MAC, Near, VNI, config, mac, until};
use super::*;
use crate::Claim;

/// A member's answer to a request.
enum Answer {
    Says(Value),
    Refuses(&'static str),
    /// These lines, and then nothing for ever.
    Follows(Vec<Value>),
    /// A byte now and then, for ever.
    Trickles,
    /// Bytes without end.
    Endless,
}

/// A connection, with TLS or without.
trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// Every request and its time.
type Asked = Arc<Mutex<Vec<(Instant, String)>>>;

/// A member with this script, and the requests to it.
fn member(
    answer: impl Fn(&str, &Value) -> Answer + Send + Sync + 'static,
    tls: impl Fn(TcpStream) -> Box<dyn Stream> + Send + Sync + 'static,
) -> (SocketAddr, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (asked, both) = (Asked::default(), Arc::new((answer, tls)));
    let notes = Arc::clone(&asked);
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let (both, notes) = (Arc::clone(&both), Arc::clone(&notes));
            thread::spawn(move || {
                let mut stream = (both.1)(near);
                while let Some((path, body)) = question(&mut stream) {
                    notes.lock().unwrap().push((Instant::now(), path.clone()));
                    if give(&mut stream, (both.0)(&path, &body)).is_err() {
                        break;
                    }
                }
            });
        }
    });
    (address, asked)
}

fn plain(stream: TcpStream) -> Box<dyn Stream> {
    Box::new(stream)
}

/// The next request; `None`: the connection has ended.
fn question(stream: &mut dyn Stream) -> Option<(String, Value)> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.extend(byte);
    }
    let head = String::from_utf8(head).unwrap();
    let len = head.split("Content-Length: ").nth(1)?.split("\r\n").next()?.parse().unwrap();
    let mut body = vec![0; len];
    stream.read_exact(&mut body).ok()?;
    let path = head.split(' ').nth(1)?.to_owned();
    Some((path, serde_json::from_slice(&body).unwrap()))
}

fn give(stream: &mut dyn Stream, answer: Answer) -> io::Result<()> {
    let mut chunked = |status: &str, lines: &[Value]| {
        stream.write_all(
            format!("HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n").as_bytes(),
        )?;
        lines.iter().try_for_each(|line| {
            let line = format!("{line}\n");
            stream.write_all(format!("{:x}\r\n{line}\r\n", line.len()).as_bytes())
        })
    };
    match answer {
        Answer::Says(value) => chunked("200 OK", &[value])?,
        Answer::Refuses(why) => chunked("400 No", &[json!({"code": 3, "message": why})])?,
        Answer::Follows(lines) => {
            chunked("200 OK", &lines)?;
            let _ = stream.read(&mut [0]); // until the other end has enough
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Answer::Endless => {
            chunked("200 OK", &[])?;
            let chunk = format!("10000\r\n{}\r\n", " ".repeat(1 << 16));
            loop {
                stream.write_all(chunk.as_bytes())?;
            }
        }
        Answer::Trickles => {
            chunked("200 OK", &[])?;
            loop {
                stream.write_all(b"1\r\n \r\n")?;
                stream.flush()?;
                let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
            }
        }
    }
    stream.write_all(b"0\r\n\r\n")
}

/// Answers of a member whose requests all succeed, at revision 5.
fn as_etcd(path: &str, body: &Value) -> Answer {
    Answer::Says(match path {
        "/v3/lease/grant" => json!({"ID": "7", "TTL": "9"}),
        "/v3/lease/keepalive" => json!({"result": {"ID": "7", "TTL": "9"}}),
        "/v3/kv/range" => json!({"header": {"revision": "5"}}),
        "/v3/kv/txn" => {
            let steps = body["success"].as_array().unwrap().len();
            let done = json!({"response_txn": {"succeeded": true}});
            json!({"header": {"revision": "6"}, "responses": vec![done; steps]})
        }
        "/v3/watch" => return Answer::Follows(vec![json!({"result": {"created": true}})]),
        _ => json!({}),
    })
}

fn at(members: &[SocketAddr]) -> Config {
    config(members.iter().map(|it| Endpoint { address: *it, is_tls: false }).collect())
}

/// A station's entry, written at revision 6.
fn entry(mac: Mac, value: &str) -> Value {
    let key = STANDARD.encode(format!("/np/{}", Key::Station(VNI, mac).text()));
    json!({"key": key, "value": STANDARD.encode(value), "mod_revision": "6", "lease": "1"})
}

const AT_TWO: &str = r#"{"host": "192.0.2.2"}"#;

#[test]
fn a_session_in_which_nothing_can_be_claimed_has_not_begun_and_members_have_rest() {
    let answer = |path: &str, body: &Value| match path {
        "/v3/kv/txn" => Answer::Refuses("too many\u{1b}[2J"),
        _ => as_etcd(path, body),
    };
    let [(one, asked), (two, _)] = [(); 2].map(|()| member(answer, plain));
    let mut host = Near::new(at(&[one, two]), 1);
    let begun = || {
        let all = asked.lock().unwrap();
        all.iter().filter(|it| it.1 == "/v3/watch").map(|it| it.0).collect::<Vec<_>>()
    };
    until([&mut host], "three rounds", |[host]| {
        assert_ne!(host.link, Some(Ok(())), "it does not do what it is for");
        begun().len() >= 3
    });
    for pair in begun().windows(2) {
        assert!(pair[1] - pair[0] >= Duration::from_millis(100), "all members were asked");
    }
    let Some(Err(why)) = host.link else { panic!("{:?}", host.link) };
    assert!(why.ends_with(": too many\\u{1b}[2J (HTTP status 400)"), "{why}");
}

#[test]
fn what_is_put_there_after_all_was_read_and_before_the_watch_is_heard() {
    let (address, _) = member(
        |path, body| match path {
            "/v3/watch" => {
                let request = &body["create_request"];
                assert_eq!(request["start_revision"], "6", "from what was read on");
                let event = json!({"kv": entry(MAC, AT_TWO)});
                let result = json!({"created": true, "events": [event]});
                Answer::Follows(vec![json!({ "result": result })])
            }
            _ => as_etcd(path, body),
        },
        plain,
    );
    let mut host = Near::new(at(&[address]), 1);
    until([&mut host], "it is heard", |[host]| host.knows_at(MAC, 2));
}

#[test]
fn whatever_else_somebody_has_put_there_the_rest_is_read() {
    const STATIONS: u16 = 3000;
    const LARGE: u16 = 700;
    let mut all: Vec<_> = (0..STATIONS).map(|n| entry(mac(n), AT_TWO)).collect();
    // A key behind the prefix that is not text.
    let key = STANDARD.encode(b"/np/\xff");
    all.push(json!({"key": key, "mod_revision": "6", "lease": "1"}));
    all.push(json!({"key": STANDARD.encode(b"/np/\xff\0"), "mod_revision": "6", "lease": "1"}));
    let decoded = |value: &Value| STANDARD.decode(value.as_str().unwrap()).unwrap();
    let keys: Vec<_> = all.iter().map(|kv| decoded(&kv["key"])).collect();
    let answer = move |path: &str, body: &Value| {
        if path != "/v3/kv/range" {
            return as_etcd(path, body);
        }
        let from = decoded(&body["key"]);
        let number = |name: &str| body[name].as_str().unwrap().parse::<usize>().unwrap();
        let (limit, revision) = (number("limit"), number("revision"));
        assert_eq!(revision, if from == b"/np/" { 0 } else { 5 }, "as of one revision");
        let begin = keys.partition_point(|key| *key < from);
        let end = keys.len().min(begin + limit);
        let keys_only = body["keys_only"] == true;
        if (begin..end).contains(&LARGE.into()) && !keys_only {
            return Answer::Endless; // a value that fits into no answer
        }
        let mut kvs = all[begin..end].to_vec();
        if keys_only {
            kvs.iter_mut().for_each(|kv| kv["value"] = "".into());
        }
        let more = end < keys.len();
        Answer::Says(json!({"header": {"revision": revision.max(5)}, "kvs": kvs, "more": more}))
    };
    let (address, _) = member(answer, plain);
    let mut host = Near::new(at(&[address]), 1);
    until([&mut host], "all are known", |[host]| {
        host.stations.len() == usize::from(STATIONS) - 1 && host.link == Some(Ok(()))
    });
    assert!(!host.stations.contains_key(&mac(LARGE)));
}

#[test]
fn a_long_value_is_nobodys_and_its_key_is_taken() {
    let answer = |path: &str, body: &Value| match path {
        "/v3/kv/range" => {
            let long = format!(r#"{{"host": "192.0.2.2", "vm": "{}"}}"#, "x".repeat(4096));
            Answer::Says(json!({"header": {"revision": "5"}, "kvs": [entry(MAC, &long)]}))
        }
        _ => as_etcd(path, body),
    };
    let (address, asked) = member(answer, plain);
    let mut host = Near::new(at(&[address]), 1);
    host.claims(MAC);
    until([&mut host], "refused", |[host]| {
        host.claims.get(&MAC) == Some(&Claim::Refused(crate::FIRST_ADDRESS))
    });
    assert!(host.stations.is_empty());
    let asked = asked.lock().unwrap();
    assert!(asked.iter().filter(|it| it.1 == "/v3/kv/txn").count() <= 2, "{asked:?}");
}

#[test]
fn a_lease_has_signs_of_life_while_a_member_is_slow() {
    let answer = |path: &str, body: &Value| {
        if path == "/v3/kv/txn" {
            let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 120_000_000 }));
        }
        as_etcd(path, body)
    };
    let (address, asked) = member(answer, plain);
    let mut host = Near::new(Config { ttl_s: 1, ..at(&[address]) }, 1);
    (0..360).for_each(|n| host.claims(mac(n))); // six transactions
    until([&mut host], "all are held", |[host]| {
        host.claims.values().filter(|claim| **claim == Claim::Held).count() == 360
    });
    let asked = asked.lock().unwrap();
    let signs = asked.split(|it| it.1.starts_with("/v3/lease/"));
    let most = signs.map(|part| part.iter().filter(|it| it.1 == "/v3/kv/txn").count()).max();
    assert!(most <= Some(3), "three of them take longer than a third of the lease: {asked:?}");
}

#[test]
fn a_claim_is_not_held_when_etcd_has_said_that_the_lease_is_gone() {
    let granted = Mutex::new(false);
    let answer = move |path: &str, body: &Value| match path {
        "/v3/lease/keepalive" => Answer::Says(json!({"result": {"ID": "7"}})),
        "/v3/lease/grant" if std::mem::replace(&mut *granted.lock().unwrap(), true) => {
            Answer::Refuses("no more")
        }
        _ => as_etcd(path, body),
    };
    let (address, _) = member(answer, plain);
    let mut host = Near::new(Config { ttl_s: 1, ..at(&[address]) }, 1);
    host.claims(MAC);
    until([&mut host], "it has it", |[host]| host.claims.get(&MAC) == Some(&Claim::Held));
    until([&mut host], "and no longer", |[host]| {
        host.claims.get(&MAC) == Some(&Claim::Waits) && matches!(host.link, Some(Err(_)))
    });
}

#[test]
fn who_stops_does_not_wait_for_a_member_that_trickles() {
    let answer = |path: &str, body: &Value| match path {
        "/v3/kv/range" => Answer::Trickles,
        _ => as_etcd(path, body),
    };
    let (address, asked) = member(answer, plain);
    let host = Near::new(Config { ttl_s: 60, ..at(&[address]) }, 1);
    let begun = Instant::now();
    while asked.lock().unwrap().iter().all(|it| it.1 != "/v3/kv/range") {
        assert!(begun.elapsed() < LIMIT);
        thread::yield_now();
    }
    let begun = Instant::now();
    drop(host);
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
}

/// Certificates of two CAs, of which each has three for the member: one for its address, one for
/// another, one of the past.
fn make_certificates(dir: &Path) {
    let script = "new='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
        printf '[ca]\\ndefault_ca=x\\n[x]\\ndatabase=index\\nserial=serial\\n' >cnf
        printf 'new_certs_dir=.\\ncertificate=ca.pem\\nprivate_key=ca.key\\n' >>cnf
        printf 'default_md=sha256\\npolicy=p\\nunique_subject=no\\n' >>cnf
        printf '[p]\\norganizationName=optional\\n' >>cnf
        : >index; echo 01 >serial
        for ca in ca other; do
            openssl req -x509 $new -keyout $ca.key -out $ca.pem -days 2 -subj /CN=$ca \\
                -addext basicConstraints=critical,CA:TRUE
        done
        openssl req $new -keyout key -out csr -subj /O=member
        for it in good:1:20990101000000Z name:2:20990101000000Z past:1:20200102000000Z; do
            IFS=: read -r name host end <<<$it
            echo subjectAltName=IP:127.0.0.$host >ext
            openssl ca -batch -notext -config cnf -startdate 20200101000000Z -enddate $end \\
                -extfile ext -in csr -out $name.pem
        done";
    let made = Command::new("bash").args(["-ec", script]).current_dir(dir).output().unwrap();
    assert!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
}

#[test]
#[ignore = "needs openssl"]
fn a_certificate_that_is_renewed_is_used_and_one_of_another_name_or_of_the_past_is_not() {
    let dir = std::env::temp_dir().join(format!("np-renewed-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    make_certificates(&dir);
    let (file, path) = (Arc::new(Mutex::new("good.pem")), dir.clone());
    let shown = Arc::clone(&file);
    let tls = move |near: TcpStream| -> Box<dyn Stream> {
        let chain = path.join(*shown.lock().unwrap());
        let chain = CertificateDer::pem_file_iter(chain).unwrap().collect::<Result<_, _>>();
        let key = PrivateKeyDer::from_pem_file(path.join("key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = config.with_no_client_auth().with_single_cert(chain.unwrap(), key).unwrap();
        Box::new(StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), near))
    };
    let (address, _) = member(as_etcd, tls);
    std::fs::copy(dir.join("other.pem"), dir.join("trusted")).unwrap();
    let tls = Tls::new(Files { ca: dir.join("trusted"), own: None }).unwrap();
    let members = vec![Endpoint { address, is_tls: true }];
    let mut host = Near::new(Config { tls: Some(tls), ..config(members) }, 1);
    let mut says = |why: &str| {
        until([&mut host], why, |[host]| match &host.link {
            Some(Err(said)) => said.contains(why),
            Some(Ok(())) => why == "well",
            None => false,
        });
    };
    says("UnknownIssuer");
    *file.lock().unwrap() = "name.pem";
    std::fs::copy(dir.join("ca.pem"), dir.join("new")).unwrap();
    std::fs::rename(dir.join("new"), dir.join("trusted")).unwrap();
    says("not valid for");
    *file.lock().unwrap() = "past.pem";
    says("expired");
    *file.lock().unwrap() = "good.pem";
    says("well");
    std::fs::remove_dir_all(&dir).unwrap();
}
