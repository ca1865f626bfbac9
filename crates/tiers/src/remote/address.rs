// SPDX-License-Identifier: Apache-2.0
//! Where a remote tier is: the URL that an operator writes.
//!
//! ```text
//!   redis://[user[:password]@]host[:port][/database][?option=value&…]
//!   rediss://…?ca=FILE[&cert=FILE&key=FILE]           the same over TLS
//!   redis+unix://[user:password@localhost]/path/of/socket[?db=NUMBER]
//! ```
//! | Option | Meaning |
//! |---|---|
//! | `cluster=true` | the server is a node of a cluster, from which the others are learnt |
//! | `node=host[:port]` | another node of the same cluster, to be asked if the first one is down; repeatable |
//! | `password-file=FILE` | the password is the first line of this file, and so in no list of processes |
//! | `password-env=NAME` | the password is the value of this variable of the environment |
//! | `ca=FILE` | certificates of the authorities that are trusted, in PEM |
//! | `cert=FILE`, `key=FILE` | our own certificate and its key, in PEM: servers ask for one by default |
//! | `noeviction=vouched` | the operator vouches that the server evicts no keys, if it refuses to say so |
//!
//! TLS trusts what `ca` names and nothing else: a server that lends memory has a certificate of its owner's
//! authority, and the authorities of web sites have no say about it.
//!
//! [`RemoteUrl`] is what was written, [`RemoteAddress`] what is used, with the password. No error and no output of
//! this module contains a password.

use super::password::{PasswordError, PasswordPlace, Secret};
use std::fmt;
use std::path::PathBuf;
use url::{Host, Url};

/// The port of a URL without one.
pub const DEFAULT_PORT: u16 = 6379;
/// Most nodes that a URL names.
const NODES_MAX: usize = 64;

/// The URL of a remote tier cannot be used. Each sentence says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddressError {
    /// It is no URL.
    #[error(
        "this is not a URL ({0}): write redis://host:6379, rediss://host:6379?ca=FILE or redis+unix:///path"
    )]
    Syntax(url::ParseError),
    /// It has another scheme.
    #[error(
        "remote pages are not stored by {0:?}: write redis://, rediss:// (TLS) or redis+unix://"
    )]
    Scheme(String),
    /// No host.
    #[error("the URL names no host: write redis://host:6379")]
    NoHost,
    /// No socket.
    #[error("the URL names no socket: write redis+unix:///path/of/socket")]
    NoPath,
    /// The database is no number.
    #[error(
        "{0:?} is not the number of a database: write /0 to /65535 after the host, or nothing for 0"
    )]
    Database(String),
    /// A cluster with a database.
    #[error("a cluster has database 0 only: leave out the database number {0}")]
    ClusterDatabase(u16),
    /// A socket and a cluster.
    #[error(
        "the nodes of a cluster are reached by host and port: write redis://host:6379?cluster=true"
    )]
    ClusterSocket,
    /// Too many nodes.
    #[error("the URL names more than 64 nodes: name some, the others are learnt from them")]
    Nodes,
    /// A node is not host and port.
    #[error("{0:?} is not a node: write node=host:6379")]
    Node(String),
    /// There is no such option.
    #[error(
        "there is no option {0:?}: there are cluster, node, password-file, password-env, ca, cert, key, noeviction, and db for sockets"
    )]
    Option(String),
    /// An option with a value that it does not have.
    #[error("{option}={value} means nothing: write {option}={expected}")]
    Value {
        /// Which one.
        option: &'static str,
        /// What was written.
        value: String,
        /// What can be written.
        expected: &'static str,
    },
    /// An option that stands there twice.
    #[error("{0} is set twice: write it once")]
    Twice(&'static str),
    /// TLS without an authority.
    #[error(
        "rediss:// needs the certificate authority to trust: add ?ca=FILE (/etc/ssl/certs/ca-certificates.crt for the public ones)"
    )]
    NoAuthority,
    /// TLS options without TLS.
    #[error("{0} is for TLS: write rediss:// instead of redis://")]
    NotTls(&'static str),
    /// A certificate without key, or a key without certificate.
    #[error("a certificate of ours needs both cert=FILE and key=FILE")]
    HalfIdentity,
    /// The user or the password is not UTF-8.
    #[error("user and password must be UTF-8, with %XX for characters that URLs reserve")]
    Credentials,
    /// A user without a password.
    #[error(
        "the URL names a user and no password: write user:password@host or add password-file=FILE or password-env=NAME"
    )]
    NoPassword,
    /// The password cannot be read.
    #[error(transparent)]
    Password(#[from] PasswordError),
}

impl AddressError {
    /// The same without parts of the URL.
    fn without_parts(self) -> Self {
        let hidden = || "…".to_owned();
        match self {
            Self::Scheme(_) => Self::Scheme(hidden()),
            Self::Database(_) => Self::Database(hidden()),
            Self::Node(_) => Self::Node(hidden()),
            Self::Option(_) => Self::Option(hidden()),
            Self::Value {
                option, expected, ..
            } => Self::Value {
                option,
                value: hidden(),
                expected,
            },
            other => other,
        }
    }
}

/// A host and its port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// Name or address, an IPv6 address without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

/// How the server is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Route {
    /// One server.
    Server(Node),
    /// One server, by its socket.
    Socket(PathBuf),
    /// A cluster, by some of its nodes.
    Cluster(Vec<Node>),
}

/// Files for TLS, all in PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// Authorities that are trusted.
    pub authorities: PathBuf,
    /// Our own certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Whether the server must say that it evicts no keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EvictionPolicy {
    /// It must.
    Asked,
    /// If it refuses to say, the operator's word is enough.
    Vouched,
}

/// A remote tier's address. Its `Display` and `Debug` have no password.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteAddress {
    /// How it is reached.
    pub route: Route,
    /// Files for TLS, if the connection is encrypted.
    pub tls: Option<TlsFiles>,
    /// The user of the server's access lists.
    pub user: Option<String>,
    /// The password.
    pub password: Option<Secret>,
    /// The number of the database.
    pub database: u16,
    /// Whether the server must say that it evicts no keys.
    pub eviction_policy: EvictionPolicy,
}

/// The URL of a remote tier: everything of its address but the password, of which it is known where it stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteUrl {
    address: RemoteAddress,
    password: Option<PasswordPlace>,
}

/// The options of a URL, each read once.
#[derive(Default)]
struct Options {
    cluster: bool,
    nodes: Vec<Node>,
    password_file: Option<String>,
    password_env: Option<String>,
    ca: Option<String>,
    cert: Option<String>,
    key: Option<String>,
    database: Option<String>,
    noeviction: Option<String>,
}

impl RemoteUrl {
    /// Reads a URL, and nothing that it names.
    ///
    /// # Errors
    /// [`AddressError`]: a sentence that says what to write instead.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        Self::read(text).map_err(|error| match text.contains('@') {
            // A password with a character that URLs reserve is taken for anything.
            true => error.without_parts(),
            false => error,
        })
    }

    fn read(text: &str) -> Result<Self, AddressError> {
        let url = Url::parse(text).map_err(AddressError::Syntax)?;
        let scheme = url.scheme();
        if !matches!(scheme, "redis" | "rediss" | "redis+unix") {
            return Err(AddressError::Scheme(scheme.to_owned()));
        }
        let options = Options::read(&url)?;
        let (user, password) = credentials(&url, &options)?;
        let eviction_policy = match options.noeviction.as_deref() {
            None => EvictionPolicy::Asked,
            Some("vouched") => EvictionPolicy::Vouched,
            Some(value) => {
                return Err(AddressError::Value {
                    option: "noeviction",
                    value: value.to_owned(),
                    expected: "vouched",
                });
            }
        };
        let (route, database) = match scheme {
            "redis+unix" => socket_route(&url, &options)?,
            _ => host_route(&url, &options)?,
        };
        let address = RemoteAddress {
            route,
            tls: tls_files(scheme, &options)?,
            user,
            password: None,
            database,
            eviction_policy,
        };
        Ok(Self { address, password })
    }

    /// Everything but the password.
    pub(super) fn bare(&self) -> &RemoteAddress {
        &self.address
    }

    /// True if the password stands in the URL itself, where whoever sees the URL sees it.
    #[must_use]
    pub fn has_password(&self) -> bool {
        matches!(self.password, Some(PasswordPlace::Url(_)))
    }

    /// The address with the password, which is read now.
    ///
    /// # Errors
    /// [`AddressError`], if the password cannot be read.
    pub fn address(self) -> Result<RemoteAddress, AddressError> {
        let password = self.password.map(|place| place.read()).transpose()?;
        Ok(RemoteAddress {
            password,
            ..self.address
        })
    }
}

impl RemoteAddress {
    /// Reads a URL, and the password that it may have or name.
    ///
    /// # Errors
    /// [`AddressError`]: a sentence that says what to write instead.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        RemoteUrl::parse(text)?.address()
    }

    /// Replaces the password in a text of the server by stars.
    pub(super) fn without_secret(&self, text: &str) -> String {
        match &self.password {
            Some(password) if !password.reveal().is_empty() => {
                text.replace(password.reveal(), "***")
            }
            _ => text.to_owned(),
        }
    }
}

impl fmt::Display for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match (&self.route, &self.tls) {
            (Route::Socket(_), _) => "redis+unix",
            (_, Some(_)) => "rediss",
            (_, None) => "redis",
        };
        write!(f, "{scheme}://")?;
        match &self.route {
            Route::Socket(path) => write!(f, "{}", path.display())?,
            Route::Server(node) => write!(f, "{node}")?,
            Route::Cluster(nodes) => {
                for (index, node) in nodes.iter().enumerate() {
                    write!(f, "{}{node}", if index == 0 { "" } else { "," })?;
                }
            }
        }
        if self.database != 0 {
            write!(f, " database {}", self.database)?;
        }
        Ok(())
    }
}

impl fmt::Display for RemoteUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Options {
    fn read(url: &Url) -> Result<Self, AddressError> {
        fn once(
            slot: &mut Option<String>,
            name: &'static str,
            value: String,
        ) -> Result<(), AddressError> {
            match slot.replace(value) {
                None => Ok(()),
                Some(_) => Err(AddressError::Twice(name)),
            }
        }
        let mut options = Self::default();
        let mut cluster = None;
        for (name, value) in url.query_pairs() {
            let value = value.into_owned();
            match name.as_ref() {
                "cluster" => once(&mut cluster, "cluster", value)?,
                "node" => options.nodes.push(node(&value)?),
                "password-file" => once(&mut options.password_file, "password-file", value)?,
                "password-env" => once(&mut options.password_env, "password-env", value)?,
                "ca" => once(&mut options.ca, "ca", value)?,
                "cert" => once(&mut options.cert, "cert", value)?,
                "key" => once(&mut options.key, "key", value)?,
                "db" => once(&mut options.database, "db", value)?,
                "noeviction" => once(&mut options.noeviction, "noeviction", value)?,
                other => return Err(AddressError::Option(other.to_owned())),
            }
        }
        options.cluster = match cluster.as_deref() {
            None => !options.nodes.is_empty(),
            Some("true") => true,
            Some("false") if options.nodes.is_empty() => false,
            Some(value) => {
                return Err(AddressError::Value {
                    option: "cluster",
                    value: value.to_owned(),
                    expected: "true",
                });
            }
        };
        Ok(options)
    }
}

/// A host with an optional port, as `node=` has it.
fn node(text: &str) -> Result<Node, AddressError> {
    let bad = || AddressError::Node(text.to_owned());
    if text.contains('@') {
        // It may have a password then.
        return Err(AddressError::Node("…@…".to_owned()));
    }
    let url = Url::parse(&format!("redis://{text}")).map_err(|_| bad())?;
    let bare = url.path().is_empty() && url.query().is_none() && url.fragment().is_none();
    if !bare {
        return Err(bad());
    }
    host(&url).ok_or_else(bad)
}

fn host(url: &Url) -> Option<Node> {
    let host = match url.host()? {
        Host::Domain("") => return None,
        Host::Domain(name) => name.to_owned(),
        Host::Ipv4(address) => address.to_string(),
        Host::Ipv6(address) => address.to_string(),
    };
    Some(Node {
        host,
        port: url.port().unwrap_or(DEFAULT_PORT),
    })
}

fn database(text: &str) -> Result<u16, AddressError> {
    text.parse()
        .map_err(|_| AddressError::Database(text.to_owned()))
}

fn host_route(url: &Url, options: &Options) -> Result<(Route, u16), AddressError> {
    let first = host(url).ok_or(AddressError::NoHost)?;
    if options.database.is_some() {
        return Err(AddressError::Option("db".to_owned()));
    }
    let database = match url.path().trim_start_matches('/') {
        "" => 0,
        text => database(text)?,
    };
    if !options.cluster {
        return Ok((Route::Server(first), database));
    }
    if database != 0 {
        return Err(AddressError::ClusterDatabase(database));
    }
    let mut nodes = vec![first];
    nodes.extend(options.nodes.iter().cloned());
    if nodes.len() > NODES_MAX {
        return Err(AddressError::Nodes);
    }
    Ok((Route::Cluster(nodes), 0))
}

fn socket_route(url: &Url, options: &Options) -> Result<(Route, u16), AddressError> {
    if options.cluster {
        return Err(AddressError::ClusterSocket);
    }
    let path = percent_encoding::percent_decode_str(url.path())
        .decode_utf8()
        .map_err(|_| AddressError::NoPath)?;
    // Credentials need a host to stand before.
    let here = matches!(url.host(), None | Some(Host::Domain("" | "localhost")));
    if path.len() < 2 || !here {
        return Err(AddressError::NoPath);
    }
    let database = options.database.as_deref().map_or(Ok(0), database)?;
    Ok((Route::Socket(PathBuf::from(path.into_owned())), database))
}

fn tls_files(scheme: &str, options: &Options) -> Result<Option<TlsFiles>, AddressError> {
    if scheme != "rediss" {
        let files = [
            ("ca", &options.ca),
            ("cert", &options.cert),
            ("key", &options.key),
        ];
        return match files.iter().find(|(_, file)| file.is_some()) {
            None => Ok(None),
            Some((name, _)) => Err(AddressError::NotTls(name)),
        };
    }
    let authorities = options.ca.as_ref().ok_or(AddressError::NoAuthority)?;
    let identity = match (&options.cert, &options.key) {
        (None, None) => None,
        (Some(cert), Some(key)) => Some((cert.into(), key.into())),
        _ => return Err(AddressError::HalfIdentity),
    };
    Ok(Some(TlsFiles {
        authorities: authorities.into(),
        identity,
    }))
}

fn credentials(
    url: &Url,
    options: &Options,
) -> Result<(Option<String>, Option<PasswordPlace>), AddressError> {
    let decode = |text: &str| {
        percent_encoding::percent_decode_str(text)
            .decode_utf8()
            .map(std::borrow::Cow::into_owned)
            .map_err(|_| AddressError::Credentials)
    };
    let user = match url.username() {
        "" => None,
        user => Some(decode(user)?),
    };
    let places = (
        url.password(),
        &options.password_file,
        &options.password_env,
    );
    let password = match places {
        (Some(password), None, None) => Some(PasswordPlace::Url(Secret::new(decode(password)?))),
        (None, Some(path), None) => Some(PasswordPlace::File(path.clone())),
        (None, None, Some(name)) => Some(PasswordPlace::Environment(name.clone())),
        (None, None, None) if user.is_some() => return Err(AddressError::NoPassword),
        (None, None, None) => None,
        _ => return Err(AddressError::Twice("the password")),
    };
    Ok((user, password))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> RemoteAddress {
        RemoteAddress::parse(text).unwrap()
    }

    fn at(host: &str, port: u16) -> Node {
        Node {
            host: host.to_owned(),
            port,
        }
    }

    #[test]
    fn url_of_a_server_gives_host_port_database_and_user() {
        let plain = parse("redis://far");
        assert_eq!(plain.route, Route::Server(at("far", DEFAULT_PORT)));
        assert_eq!((plain.database, plain.tls, plain.user), (0, None, None));
        assert_eq!(plain.eviction_policy, EvictionPolicy::Asked);
        let full = parse("redis://pages:s%40cret@[fd00::7]:7000/3?noeviction=vouched");
        assert_eq!(full.route, Route::Server(at("fd00::7", 7000)));
        assert_eq!((full.database, full.user.as_deref()), (3, Some("pages")));
        assert_eq!(full.password.as_ref().unwrap().reveal(), "s@cret");
        assert_eq!(full.eviction_policy, EvictionPolicy::Vouched);
        assert_eq!(parse("redis://:only@far/").user, None);
    }

    #[test]
    fn url_of_a_cluster_names_nodes() {
        let nodes = vec![at("a", 6379), at("b", 7001), at("10.0.0.3", 6379)];
        let cluster = parse("redis://a?node=b:7001&node=10.0.0.3");
        assert_eq!(cluster.route, Route::Cluster(nodes));
        let one = parse("redis://a:1?cluster=true");
        assert_eq!(one.route, Route::Cluster(vec![at("a", 1)]));
    }

    #[test]
    fn url_of_a_socket_gives_path_and_database() {
        let socket = parse("redis+unix:///run/redis%20x.sock?db=2");
        assert_eq!(socket.route, Route::Socket("/run/redis x.sock".into()));
        assert_eq!(socket.database, 2);
        let with_user = parse("redis+unix://pages:secret@localhost/run/x");
        assert_eq!(with_user.route, Route::Socket("/run/x".into()));
        assert_eq!(with_user.user.as_deref(), Some("pages"));
    }

    #[test]
    fn url_of_tls_names_the_authority_and_our_certificate() {
        let tls = parse("rediss://far?ca=/ca.pem&cert=/c.pem&key=/k.pem")
            .tls
            .unwrap();
        assert_eq!(tls.authorities, PathBuf::from("/ca.pem"));
        assert_eq!(tls.identity, Some(("/c.pem".into(), "/k.pem".into())));
    }

    #[test]
    fn bad_urls_are_refused_with_what_to_write_instead() {
        for (text, part) in [
            ("far:6379", "write redis://"),
            ("far", "write redis://host:6379"),
            ("memcached://far", "write redis://"),
            ("redis://", "write redis://host:6379"),
            ("redis+unix://far/path", "redis+unix:///path"),
            ("redis+unix:///s?cluster=true", "host and port"),
            ("redis://far/pages", "/0 to /65535"),
            ("redis://far/65536", "/0 to /65535"),
            ("redis://far/-1", "/0 to /65535"),
            ("redis://far/1?cluster=true", "leave out"),
            ("redis://far?cluster=yes", "write cluster=true"),
            ("redis://far?cluster=false&node=b", "write cluster=true"),
            ("redis://far?node=b:x", "write node=host:6379"),
            ("redis://far?node=b/1", "write node=host:6379"),
            ("redis://far?timeout=1", "there are cluster, node"),
            ("redis://far?db=1", "there are cluster, node"),
            ("redis://far?noeviction=yes", "write noeviction=vouched"),
            ("redis://far?cluster=true&cluster=true", "write it once"),
            ("rediss://far", "add ?ca=FILE"),
            ("rediss://far?ca=/c&cert=/c", "both cert=FILE and key=FILE"),
            ("redis://far?ca=/c", "write rediss://"),
            ("redis://user@far", "user:password@host"),
            ("redis://:%ff@far", "UTF-8"),
            ("redis://:x@far?password-file=/f", "write it once"),
            (
                "redis://far?password-file=/nowhere/at/all",
                "cannot be read",
            ),
            ("redis://far:70000", "write redis://host:6379"),
        ] {
            let error = RemoteAddress::parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let many = "&node=n".repeat(NODES_MAX);
        let error = RemoteAddress::parse(&format!("redis://far?x{many}").replace("x&", ""));
        assert_eq!(error.unwrap_err(), AddressError::Nodes);
    }

    #[test]
    fn no_output_contains_the_password() {
        let address = parse("redis://pages:hunter2@far:7000/3");
        for text in [format!("{address}"), format!("{address:?}")] {
            assert!(!text.contains("hunter2"), "{text}");
            assert!(text.contains("far"), "{text}");
        }
        assert_eq!(address.to_string(), "redis://far:7000 database 3");
        assert_eq!(address.without_secret("bad hunter2!"), "bad ***!");
        for text in [
            "redis://pages:hunter2@far/x",
            "redis://pages:hunter2@far:x",
            "redis://pages:hunter2@",
            "far://pages:hunter2@far",
            "redis://far?node=u:hunter2@b/1",
            "redis://far?node=u:hunter2@b",
            "pages:hunter2@far",
        ] {
            let error = RemoteAddress::parse(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn url_tells_where_the_password_stands_and_reads_it_later() {
        for (text, has_password) in [
            ("redis://far", false),
            ("redis://:hunter2@far", true),
            ("redis://pages:@far", false),
            ("redis://u@far?password-file=/nowhere/at/all", false),
            ("redis://u@far?password-env=PT_PASSWORD", false),
        ] {
            let url = RemoteUrl::parse(text);
            assert!(!format!("{url:?}").contains("hunter2"));
            match url {
                Ok(url) => assert_eq!(url.has_password(), has_password, "{text}"),
                Err(error) => assert_eq!(
                    (text, error),
                    ("redis://pages:@far", AddressError::NoPassword)
                ),
            }
        }
        let unset = RemoteAddress::parse("redis://far?password-env=PT_NOT_SET_AT_ALL");
        assert!(unset.unwrap_err().to_string().contains("is not set"));
        let both = "redis://far?password-env=A&password-file=/f";
        assert_eq!(
            RemoteUrl::parse(both),
            Err(AddressError::Twice("the password"))
        );
    }
}
