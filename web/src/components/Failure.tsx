import { useState } from "preact/hooks";

import { token, type ApiError } from "../api";

/** An error page: the reason, and what to do. */
export function Failure({ error, onRetry }: { error: ApiError; onRetry: () => void }) {
  // A 403 without a token has another reason, and its detail says what to do.
  if (error.unauthorized || (error.status === 403 && token.get() !== null)) return <TokenForm error={error} onRetry={onRetry} />;
  return (
    <div class="notice" role="alert">
      <h1>{error.missing ? "Job not found" : error.title}</h1>
      <p>
        {error.missing
          ? "This server has no job with this id. It may use another database."
          : error.detail === ""
            ? "Check that the server is running. This page retries automatically."
            : error.detail}
      </p>
      <p>
        {error.missing ? (
          <a href="/">All jobs</a>
        ) : (
          <button type="button" onClick={onRetry}>
            Try again now
          </button>
        )}
      </p>
    </div>
  );
}

function TokenForm({ error, onRetry }: { error: ApiError; onRetry: () => void }) {
  const [value, setValue] = useState("");
  const refused = token.get() !== null;
  return (
    <form
      class="notice"
      onSubmit={(event) => {
        event.preventDefault();
        token.set(value.trim());
        onRetry();
      }}
    >
      <h1>This server requires a token</h1>
      <p>
        {refused ? `The token was rejected: ${error.detail} ` : ""}A token with scope <code>viewer</code> can
        read, one with scope <code>operator</code> can also approve actions. It is stored until this tab is closed.
      </p>
      <p>
        Or sign in with the link that <code>paceline login</code> prints. To create a token, run this on the server:
      </p>
      <pre>paceline server token create --name NAME --scope viewer</pre>
      <p class="row">
        <label class="sr" for="token">
          Token
        </label>
        <input
          id="token"
          type="password"
          autocomplete="off"
          placeholder="Token"
          value={value}
          onInput={(event) => {
            setValue(event.currentTarget.value);
          }}
        />
        <button type="submit" class="primary" disabled={value.trim() === ""}>
          Continue
        </button>
      </p>
    </form>
  );
}
