// What the sidecar says, as it changes: one request waits for the next change. The token, where one is
// needed, lives in this tab's sessionStorage and travels in a header.

const KEPT_AS = "lora-fs-token";
const WAIT_S = 20;
const RETRY_MS = [500, 1000, 2000, 5000];

export const token = {
  get: () => sessionStorage.getItem(KEPT_AS) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEPT_AS, value) : sessionStorage.removeItem(KEPT_AS)),
};

/** A read that failed, and why. `status` is the answer's, 0 where none came. */
export class Failed extends Error {
  constructor(status, why) {
    super(why);
    this.status = status;
    this.isRefused = status === 401 || status === 403;
  }
}

/** What a path answers; null where nothing changed. Throws Failed. */
export async function ask(path, signal) {
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  try {
    const answer = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
    if (answer.status === 204) return null;
    if (answer.ok) return await answer.json();
    throw new Failed(answer.status, await reasonOf(answer));
  } catch (error) {
    throw error instanceof Failed ? error : new Failed(0, error.message);
  }
}

async function reasonOf(answer) {
  const told = await answer.json().catch(() => null);
  return told?.error?.message ?? `HTTP ${answer.status}`; // some router's page, not an error of a sidecar's
}

/** Follow the sidecar until `signal` ends. `on.data`, `on.refused`, `on.lost` tell what comes. */
export async function follow(on, signal) {
  let since = "";
  let failures = 0;
  while (!signal.aborted) {
    try {
      const timeout = AbortSignal.any([signal, AbortSignal.timeout(1000 * (WAIT_S + 10))]);
      const told = await ask(`/v1/dashboard?wait_s=${WAIT_S}&since=${since}`, timeout);
      failures = 0;
      if (told) since = told.since;
      on.data(told);
      if (!told && !since) await pause(RETRY_MS[0], signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error.isRefused) {
        on.refused();
        return;
      }
      on.lost(error);
      await pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], signal);
    }
  }
}

export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
