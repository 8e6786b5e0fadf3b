import { render } from "preact";
import "uplot/dist/uPlot.min.css";

import { keepSession } from "./api";
import { ReadOnly } from "./components/ReadOnly";
import { route, startRouter } from "./router";
import "./styles.css";
import { JobView } from "./views/Job";
import { Jobs } from "./views/Jobs";

function View() {
  const current = route.value;
  switch (current.view) {
    case "jobs":
      return <Jobs />;
    case "job":
      return <JobView key={current.id} id={current.id} />;
    case "missing":
      return (
        <div class="notice">
          <h1>Page not found</h1>
          <p>
            There is no page at this address. <a href="/">All jobs</a>
          </p>
        </div>
      );
  }
}

function Page() {
  return (
    <>
      <nav>
        <a class="brand" href="/">
          Paceline
        </a>
        {route.value.view === "job" && <a href="/">Jobs</a>}
      </nav>
      <main>
        <ReadOnly />
        <View />
      </main>
    </>
  );
}

const root = document.getElementById("app");
if (root === null) throw new Error("index.html has no #app");
keepSession();
startRouter();
render(<Page />, root);
