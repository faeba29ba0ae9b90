//! Requests to etcd's gateway and its answers (etcd 3.4, `rpc.proto`, as JSON: numbers of 64 bits
//! are strings, bytes are base64).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::{Value, json};

use super::schema::VALUE_BYTES_MAX;

/// A key and its value.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(default)]
pub(super) struct Kv {
    #[serde(deserialize_with = "bytes")]
    pub(super) key: Vec<u8>,
    #[serde(deserialize_with = "text")]
    pub(super) value: String,
    #[serde(deserialize_with = "number")]
    pub(super) mod_revision: i64,
    #[serde(deserialize_with = "number")]
    pub(super) lease: i64,
}

impl Kv {
    /// Bytes of key and value.
    pub(super) fn len(&self) -> usize {
        self.key.len() + self.value.len()
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    #[serde(deserialize_with = "number")]
    pub(super) revision: i64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Range {
    pub(super) header: Header,
    pub(super) kvs: Vec<Kv>,
    /// More keys follow.
    pub(super) more: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Token {
    pub(super) token: String,
}

/// The answer to a grant and to a keep-alive; a lease that does not exist has no seconds left.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Lease {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: i64,
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) ttl_s: i64,
}

/// A line of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Watched {
    pub(super) events: Vec<WatchEvent>,
    pub(super) canceled: bool,
    #[serde(deserialize_with = "number")]
    pub(super) compact_revision: i64,
    pub(super) cancel_reason: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchEvent {
    /// Empty for a put.
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) kv: Kv,
}

impl WatchEvent {
    pub(super) fn is_deletion(&self) -> bool {
        self.kind == "DELETE"
    }
}

/// The answer to a transaction of transactions.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Done {
    pub(super) header: Header,
    pub(super) responses: Vec<DoneOne>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct DoneOne {
    pub(super) response_txn: Outcome,
}

/// The answer to one inner transaction.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Outcome {
    pub(super) succeeded: bool,
    responses: Vec<Found>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Found {
    response_range: Range,
}

impl Outcome {
    /// The entry that failed the condition.
    pub(super) fn found(self) -> Option<Kv> {
        self.responses.into_iter().next()?.response_range.kvs.into_iter().next()
    }
}

/// An error in place of an answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Refusal {
    pub(super) code: i64,
    pub(super) message: String,
}

/// Condition of a change.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum If {
    /// The key does not exist.
    Vacant,
    /// The entry was written at this revision.
    Since(i64),
    /// The entry has this lease.
    Leased(i64),
    /// No condition.
    Any,
}

/// A change of one key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct KeyChange {
    pub(super) key: String,
    pub(super) condition: If,
    /// `None`: the key is deleted.
    pub(super) value: Option<String>,
}

impl KeyChange {
    fn request(&self, lease: i64) -> Value {
        let key = encoded(&self.key);
        let compare = match self.condition {
            If::Vacant => {
                json!([{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}])
            }
            If::Since(revision) => {
                let revision = revision.to_string();
                json!([{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}])
            }
            If::Leased(lease) => {
                let lease = lease.to_string();
                json!([{"key": key, "target": "LEASE", "result": "EQUAL", "lease": lease}])
            }
            If::Any => json!([]),
        };
        let change = match &self.value {
            Some(value) => json!({"request_put":
                {"key": key, "value": encoded(value), "lease": lease.to_string()}}),
            None => json!({"request_delete_range": {"key": key}}),
        };
        json!({"request_txn": {
            "compare": compare, "success": [change], "failure": [{"request_range": {"key": key}}]
        }})
    }
}

/// One transaction of several changes, each with its own condition.
pub(super) fn transaction(steps: &[KeyChange], lease: i64) -> Value {
    let steps: Vec<_> = steps.iter().map(|step| step.request(lease)).collect();
    json!({"success": steps})
}

/// A request for all keys with this prefix.
pub(super) fn range(prefix: &str) -> Value {
    json!({"key": encoded(prefix), "range_end": STANDARD.encode(end_of(prefix))})
}

/// A page of the keys with a prefix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a> {
    /// The page begins behind this key; `None`: at the first key.
    pub(super) behind: Option<&'a [u8]>,
    /// Revision of the answer; 0: the newest.
    pub(super) revision: i64,
    /// Most keys in the page.
    pub(super) limit: usize,
    /// Keys without values.
    pub(super) keys_only: bool,
}

/// A request for one page of the keys with this prefix.
pub(super) fn page(prefix: &str, page: Page<'_>) -> Value {
    let Page { behind, revision, limit, keys_only } = page;
    let mut request = range(prefix);
    if let Some(key) = behind {
        request["key"] = STANDARD.encode([key, &[0]].concat()).into();
    }
    request["revision"] = revision.to_string().into();
    request["limit"] = limit.to_string().into();
    request["keys_only"] = keys_only.into();
    request
}

/// A request for the changes from this revision on; large ones are fragmented over lines.
pub(super) fn watch(prefix: &str, revision: i64) -> Value {
    let mut request = range(prefix);
    request["start_revision"] = revision.to_string().into();
    request["fragment"] = true.into();
    json!({"create_request": request})
}

fn encoded(text: &str) -> String {
    STANDARD.encode(text)
}

/// The first key behind those with this prefix.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1; // UTF-8 has no 0xff
    }
    end
}

fn number<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    match Value::deserialize(from)? {
        Value::String(text) => text.parse().map_err(D::Error::custom),
        Value::Number(n) => n.as_i64().ok_or_else(|| D::Error::custom("too large a number")),
        other => Err(D::Error::custom(format!("{other} is not a number"))),
    }
}

fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    STANDARD.decode(String::deserialize(from)?).map_err(D::Error::custom)
}

/// Bytes that are not text, or too many, become a text that no parser accepts.
fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let mut bytes = bytes(from)?;
    if bytes.len() > VALUE_BYTES_MAX {
        bytes.clear();
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
