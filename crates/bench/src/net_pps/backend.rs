// SPDX-License-Identifier: Apache-2.0
//! Our back end as a separate process: the DPU, one network device, nothing else. The end of its input ends it.

use crate::blk::backend::LookUpMode;
use clap::Args;
use pagetide_dpu::{
    Dpu, DpuConfig, DpuError, LinkConfig, NicConfig, RamPolicy, ReceiveConfig, SocketAccess,
};
use pagetide_vpri::{DomainTable, Doorbell};
use std::{
    io::{Read as _, Write as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

/// Where and what to serve.
#[derive(Args, Debug, Clone)]
pub struct NetBackendOptions {
    /// Socket to listen on
    #[arg(long)]
    pub socket: PathBuf,
    /// Directory for the engine's lock
    #[arg(long)]
    pub state_dir: PathBuf,
    /// Packets of this length come without end; else none
    #[arg(long, conflicts_with = "echo")]
    pub source_bytes: Option<u16>,
    /// Packets that are sent come back
    #[arg(long)]
    pub echo: bool,
    /// Whether the engine looks pages up before each DMA
    #[arg(long, value_enum, default_value_t = LookUpMode::On)]
    pub look_up: LookUpMode,
}

impl NetBackendOptions {
    fn link(&self) -> LinkConfig {
        match (self.echo, self.source_bytes) {
            (true, _) => LinkConfig::Loop,
            (false, Some(bytes)) => LinkConfig::Source { bytes },
            (false, None) => LinkConfig::Null,
        }
    }
}

/// Why the back end ended.
#[derive(Debug, thiserror::Error)]
pub enum NetBackendError {
    /// The DPU.
    #[error(transparent)]
    Dpu(#[from] DpuError),
    /// Its lines.
    #[error("the bench's lines: {0}")]
    Lines(#[from] std::io::Error),
}

/// Serves until the end of input. Prints a line once it listens.
///
/// # Errors
/// [`NetBackendError`].
pub fn serve(options: &NetBackendOptions) -> Result<(), NetBackendError> {
    let domains = Arc::new(DomainTable::new(1));
    let bell = Arc::new(Doorbell::new()?);
    let config = DpuConfig::new(options.state_dir.clone());
    // No VM is attached, so no page is ever absent and these ends need no service.
    let (dpu, _host_ends) = Dpu::start(&config, domains, &bell)?;
    dpu.add_nic(&NicConfig {
        socket: options.socket.clone(),
        pairs: 1,
        link: options.link(),
        receive: ReceiveConfig::default(),
        look_up: options.look_up.with_extra(Duration::ZERO),
        ram: RamPolicy::default(),
        access: SocketAccess::default(),
    })?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "listening")?;
    out.flush()?;
    let mut nothing = Vec::new();
    std::io::stdin().lock().read_to_end(&mut nothing)?;
    dpu.shut_down();
    Ok(())
}
