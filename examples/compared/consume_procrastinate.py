"""procrastinate --app=compared.consume_procrastinate.jobs worker"""

import psycopg
from procrastinate import App, JobContext, PsycopgConnector

DATABASE = "postgresql://localhost/shop"
jobs = App(connector=PsycopgConnector(conninfo=DATABASE))


@jobs.periodic(cron="* * * * *")  # type: ignore[untyped-decorator, unused-ignore]
@jobs.task(queueing_lock="retry_stalled")  # type: ignore[untyped-decorator, unused-ignore]
async def retry_stalled(timestamp: int) -> None:
    for job in await jobs.job_manager.get_stalled_jobs():
        await jobs.job_manager.retry_job(job)


@jobs.task(name="bill", pass_context=True, retry=10)  # type: ignore[untyped-decorator, unused-ignore]
async def bill(context: JobContext, order: str) -> None:
    async with await psycopg.AsyncConnection.connect(DATABASE) as connection:
        new = "INSERT INTO inbox_by_hand VALUES (%s) ON CONFLICT DO NOTHING RETURNING id"
        if await (await connection.execute(new, [context.job.id])).fetchone():
            await connection.execute('INSERT INTO invoices ("order") VALUES (%s)', [order])
