// SPDX-License-Identifier: Apache-2.0
//! `pagetide upgrade`: asks for an upgrade, and waits for how it comes out.

use super::{
    UpgradeReport, UpgradeState,
    api::{PATH, UpgradeBody},
};
use crate::{
    cli::UpgradeArgs,
    client::{Client, ClientError},
};
use hyper::Method;
use pagetide_report::outcome::{CommandError, print_report};
use std::time::{Duration, Instant};

/// Between two looks at how it comes out.
const LOOK: Duration = Duration::from_millis(20);
/// How long it may take to come out: the daemon's own bounds are shorter unless its settings are very long.
const PATIENCE: Duration = Duration::from_secs(600);

/// Executes it.
///
/// # Errors
/// The daemon refuses, or the new program has failed.
pub(crate) fn execute(args: &UpgradeArgs) -> Result<(), CommandError> {
    // The daemon follows no link. Here it does no harm: the daemon checks what comes of it.
    let program = std::fs::canonicalize(&args.program).map_err(|error| {
        CommandError::refused(format!("cannot find {}: {error}", args.program.display()))
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CommandError::failed(format!("cannot start the client: {error}")))?;
    let client = Client::new(&args.client.api);
    let report = runtime.block_on(upgraded(&client, &UpgradeBody { program }))?;
    match (report.state, &report.reason) {
        (UpgradeState::Done, _) => print_report(&report, args.client.json.into()),
        (UpgradeState::GivenUp, Some(reason)) => Err(CommandError::refused(format!(
            "the upgrade was given up, and nothing has happened: {reason}"
        ))),
        (_, reason) => Err(CommandError::failed(format!(
            "the new program has failed, and the old one goes on as process {}: {}",
            report.pid,
            reason.as_deref().unwrap_or("see the log")
        ))),
    }
}

async fn upgraded(client: &Client, body: &UpgradeBody) -> Result<UpgradeReport, CommandError> {
    let mut report: UpgradeReport = client.send(Method::POST, PATH, body).await?;
    let begun = Instant::now();
    while report.state == UpgradeState::UnderWay && begun.elapsed() < PATIENCE {
        tokio::time::sleep(LOOK).await;
        // A connection that was in the backlog of the old program ends with it: ask again.
        match client.ask(Method::GET, PATH).await {
            Ok(now) => report = now,
            Err(ClientError::Broken { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(report)
}
